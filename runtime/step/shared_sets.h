// Reuses retrieved sets in later steps: clustered index sharing ([PrHS] §IV-A), for
// each (layer, KV head) by itself.
//
// Decoding is cut into blocks of `block` steps. The first query of a block retrieves. A later query
// whose cosine similarity to an earlier one of the block exceeds the threshold uses the set of the
// most recent such query, widened by the neighbours of the tokens that scored best when the set was
// retrieved. The query heads of a group share one set, so the least similar of them decides.
//
// Thread-safety: all methods may be called concurrently.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "base/memory_budget.h"
#include "prefixd/partition.h"
#include "prefixd/policy.h"
#include "prefixd/selection.h"
#include "runtime/step/gathered_rows.h"

namespace prefixd {

struct RetrievedSet {
  std::vector<uint32_t> ids;  // ascending
  // [G] the cuts of the query that retrieved the set, less the log-sum-exp of its scores on the set
  // (MakeCutOffsets).
  std::vector<Cut> offsets;
  std::shared_ptr<GatheredRowsSlot> rows = {};  // only in sets that steps read
};
using SharedSet = std::shared_ptr<const RetrievedSet>;

// A shared set gets approximate cuts: the cut of its retrieving query, moved by as much as the
// set's own log-sum-exp moved. This holds because alike queries score the unread tokens much alike,
// relative to the set's log-sum-exp.
//   scores: [G][n] on the set, as it was read. A missing cut stays missing.
std::vector<Cut> MakeCutOffsets(std::span<const Cut> cuts, std::span<const float> scores);
std::vector<Cut> CutsFromOffsets(std::span<const Cut> offsets, std::span<const float> scores);

class SharedSets {
 public:
  // groups: the query heads of each head's group. Where `memory` has no room, sets are not kept,
  // and later steps retrieve their own.
  SharedSets(const StepPolicy::Sharing& sharing, std::span<const uint32_t> groups,
             const MemoryAccount& memory = {});

  // Call once for every step of `head`. Returns the set that the step shares, or null: then the
  // step retrieves, and passes its set to Keep.  q: [G][key_dim]. last: if not null, receives
  // whether no later step may share that set.
  SharedSet Find(size_t head, std::span<const float> q, bool* last = nullptr);
  void Keep(size_t head, std::span<const float> q, RetrievedSet set);

 private:
  struct Query {
    std::vector<float> q;
    std::vector<double> norms;  // [G]
  };
  struct Retrieved {
    Query query;  // the query that retrieved the set
    SharedSet set;
  };
  struct Step {
    Query query;
    std::shared_ptr<const Retrieved> set;
  };
  struct Head {
    uint32_t group = 0;
    std::mutex mutex;
    uint32_t at = 0;            // position in the block
    std::vector<Step> earlier;  // steps of the block that have a set
    MemoryCharge memory;        // theirs, with their sets
  };
  uint64_t BytesOf(const Query& query) const;
  uint64_t BytesOf(const Retrieved& retrieved) const;
  static Query QueryOf(std::span<const float> q, uint32_t group);
  bool Similar(const Query& a, const Query& b) const;

  const StepPolicy::Sharing sharing_;
  std::vector<Head> heads_;
};

// Returns `ids` (ascending, each once) and the neighbours of `best`, up to `reach` to either side,
// as far as they lie in `within`. Ascending, each once.
std::vector<uint32_t> Dilated(std::span<const uint32_t> ids, std::span<const uint32_t> best,
                              uint32_t reach, TokenRange within);

}  // namespace prefixd
