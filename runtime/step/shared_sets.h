// Retrieved sets that later steps use again: clustered index sharing (spec §8; paper 002 §IV-A),
// for each (layer, KV head) by itself.
//
// Decoding is cut into blocks of `block` steps. The first query of a block retrieves. A later one
// whose cosine similarity to an earlier query of the block is above the threshold uses that query's
// set, the most recent such, widened by the neighbours of the tokens that scored best when it was
// retrieved. The query heads of a group share one set, so the least similar of them decides.
//
// Thread-safety: all methods may be called concurrently.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "prefixd/partition.h"
#include "prefixd/selection.h"
#include "prefixd/types.h"
#include "runtime/step/set_rows.h"

namespace prefixd {

struct RetrievedSet {
  std::vector<uint32_t> ids;  // ascending
  // [G] the cuts of the query that retrieved it, less the log-sum-exp of the scores that it gave
  // the set (MakeCutOffsets).
  std::vector<Cut> offsets;
  std::shared_ptr<SetRowsSlot> rows = {};  // of a set that steps read
};
using SharedSet = std::shared_ptr<const RetrievedSet>;

// What lies unread beyond a set scores, measured from the set's own log-sum-exp, much the same for
// queries that are alike. So a shared set has cuts, approximate ones: that of its retrieving query,
// moved by as much as the set's scores moved.
//   scores: [G][n] of the set, as it was read. A cut that was none stays none.
std::vector<Cut> MakeCutOffsets(std::span<const Cut> cuts, std::span<const float> scores);
std::vector<Cut> CutsFromOffsets(std::span<const Cut> offsets, std::span<const float> scores);

class SharedSets {
 public:
  SharedSets(const StepPolicy::Sharing& sharing, size_t heads, uint32_t group);

  // Once for every step of `head`: the set that it shares, or null: then it retrieves, and Keep
  // says what.  q: [G][key_dim]. last: if not null, whether no later step may share that set.
  SharedSet Find(size_t head, std::span<const float> q, bool* last = nullptr);
  void Keep(size_t head, std::span<const float> q, RetrievedSet set);

 private:
  struct Query {
    std::vector<float> q;
    std::vector<double> norms;  // [G]
  };
  struct Retrieved {
    Query query;  // that retrieved it
    SharedSet set;
  };
  struct Step {
    Query query;
    std::shared_ptr<const Retrieved> set;
  };
  struct Head {
    std::mutex mutex;
    uint32_t at = 0;            // of the block
    std::vector<Step> earlier;  // steps of the block that have a set
  };
  Query QueryOf(std::span<const float> q) const;
  bool Similar(const Query& a, const Query& b) const;

  const StepPolicy::Sharing sharing_;
  const uint32_t group_;
  std::vector<Head> heads_;
};

// `ids` (ascending, each once) and the neighbours of `best`, up to `reach` to either side, as far
// as they lie in `within`. Ascending, each once.
std::vector<uint32_t> Dilated(std::span<const uint32_t> ids, std::span<const uint32_t> best,
                              uint32_t reach, TokenRange within);

}  // namespace prefixd
