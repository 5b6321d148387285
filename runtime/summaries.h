// Summaries of a stored prefix's mid region, put together from what lies beside its segments.
//
// A segment keeps cumulative checkpoints: the summary of its own tokens up to a position, sinks
// left out. Disjoint sets merge and nothing is ever subtracted (spec §3, "only ever add"): for
// each segment of the chain the last checkpoint that still fits is loaded, and the rows between it
// and where the mid region (or the segment's use) ends are added.
//
// Thread-safety: free functions; concurrent calls are fine.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "attention/moments.h"
#include "attention/partition.h"
#include "attention/phi_cache.h"
#include "attention/result.h"
#include "runtime/models.h"
#include "runtime/scratch.h"
#include "runtime/store.h"
#include "runtime/thread_pool.h"
#include "storage/prefix_store.h"

namespace prefixd {

// What the parts of the runtime share; outlives all of them.
struct Rooms {
  const RuntimeOptions* options = nullptr;
  storage::PrefixStore* storage = nullptr;
  ThreadPool* pool = nullptr;
  ScratchPool* scratch = nullptr;
};

// Rows are read and added in runs of this many tokens.
inline constexpr uint32_t kRunTokens = 2048;

// One segment of a prefix's chain and how much of it the prefix uses.
struct SegmentPart {
  storage::SegmentId id;
  TokenRange stored;  // positions of the segment's own tokens
  TokenRange used;    // [stored.begin, e): never empty
};
// The chain of `prefix`, cut at n_tokens (at most the prefix's).
Result<std::vector<SegmentPart>> ChainParts(const storage::PrefixStore& storage,
                                            const storage::PrefixInfo& prefix, uint32_t n_tokens);

// Where a segment's checkpoints lie: every checkpoint_tokens from its start, at its end, and
// n_tail before its end (where the mid region of a prefix ending here ends). Ascending; only
// positions past the sinks.
std::vector<uint32_t> CheckpointPositions(TokenRange segment, Anchors anchors,
                                          uint32_t checkpoint_tokens);

// How far a background job has come, and whether it shall stop.
struct WorkProgress {
  std::atomic<uint64_t> done{0}, total{0};
  std::atomic<bool> cancelled{false};
  Status Check() const;  // kCancelled when it shall stop
};

// One kind of summary: how it is named, made and read back. Entries are per (layer, KV head),
// index layer * n_kv_heads + kv_head; layers without summaries have empty ones.
class MomentKind {
 public:
  using Summary = MomentSummary;
  MomentKind(const Model& model, Anchors anchors, bool with_cross);

  std::string BlobName(uint32_t position) const { return prefix() + std::to_string(position); }
  std::string prefix() const { return "moments."; }
  const std::string& producer() const { return producer_; }
  const Model& model() const { return model_; }
  Summary Empty() const;
  void Add(Summary& to, uint32_t layer, uint32_t kv_head, const RowsView& rows) const;

 private:
  const Model& model_;
  bool with_cross_;
  std::string producer_;
};

class PhiKind {
 public:
  using Summary = PhiCache;
  PhiKind(const Model& model, const FeatureMapSet& maps, Anchors anchors);

  std::string BlobName(uint32_t position) const { return prefix() + std::to_string(position); }
  std::string prefix() const { return "phi." + std::to_string(maps_.length) + "."; }
  const std::string& producer() const { return producer_; }
  const Model& model() const { return model_; }
  Summary Empty() const;
  void Add(Summary& to, uint32_t layer, uint32_t kv_head, const RowsView& rows) const;

 private:
  const Model& model_;
  const FeatureMapSet& maps_;
  std::string producer_;
};

// Writes the checkpoints of a segment that are not stored yet (or by another producer): the
// segment is the end of `prefix`, which is open at its full length. Counts heads in `progress`.
template <typename Kind>
Status BuildCheckpoints(const Rooms& rooms, const Kind& kind, const storage::StoredPrefix& prefix,
                        const SegmentPart& segment, Anchors anchors, uint32_t checkpoint_tokens,
                        WorkProgress& progress);

// The summaries of `mid`, a region that begins behind the sinks, for all heads.
//   max_added: rows that may be added per head and segment where checkpoints do not reach; beyond
//   it kFailedPrecondition asks to wait for the ingest.
//   reads: [heads] if not null; physical reads are added to it.
template <typename Kind>
Result<std::vector<typename Kind::Summary>> AssembleSummaries(
    const Rooms& rooms, const Kind& kind, const storage::StoredPrefix& prefix,
    const std::vector<SegmentPart>& parts, TokenRange mid, uint64_t max_added,
    WorkPriority priority, std::vector<storage::ReadStats>* reads);

}  // namespace prefixd
