// Makes the partitions of keys that the estimators by clusters use: one per (segment, layer, KV
// head). Ingest fits each to a sample of the segment's own keys, so that no segment depends on how
// another was clustered. A prefix of several segments takes the clusters of its largest segment;
// each cluster of the others joins, whole, the nearest of them. The sums stay exact, and the
// summary's size does not grow with the chain.
//
// Thread-safety: free functions and const methods may be called concurrently.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "attention/estimators/clusters.h"
#include "base/memory_budget.h"
#include "index/search/key_reader.h"
#include "runtime/summaries/summaries.h"

namespace prefixd {

// Fits and stores the clusterings that are missing. The segment is the end of `prefix`. Counts
// heads in `progress`.
Result<std::vector<Clustering>> BuildClusterings(const DerivedContext& context, const Model& model,
                                                 const storage::StoredPrefix& prefix,
                                                 const SegmentPart& segment,
                                                 WorkProgress& progress);
bool HasClusterings(const DerivedContext& context, const storage::SegmentId& id);
// kFailedPrecondition when they are not built yet.
Result<std::vector<Clustering>> LoadClusterings(const DerivedContext& context, const Model& model,
                                                const storage::SegmentId& id);

// The clusters of one prefix's mid region.
class PrefixClusters {
 public:
  // Loads clusterings and checkpoints of the chain. kResourceExhausted: `memory` has no room.
  static Result<std::shared_ptr<const PrefixClusters>> Assemble(
      const DerivedContext& context, const Model& model, const storage::StoredPrefix& prefix,
      const std::vector<SegmentPart>& parts, TokenRange mid, uint64_t max_added,
      WorkPriority priority, std::vector<storage::ReadStats>* reads, const MemoryAccount& memory);

  // Returns the gathered summaries of all heads; they borrow from this object.
  const SummarySet& summaries() const { return summaries_; }
  const Clustering& clustering(size_t head) const { return main_->at(head); }
  // Returns the cluster of each token in a run of the mid region, given the run's keys.
  std::vector<uint16_t> Of(size_t head, TokenRange run, const RowsView& keys) const;
  // Returns the cluster of each token of the mid region, computed once from `keys` and then kept.
  Result<std::span<const uint16_t>> OfMid(size_t head, index::KeyReader& keys) const;

 private:
  struct Part {
    TokenRange range;                                            // part of the mid region
    std::shared_ptr<const std::vector<Clustering>> clusterings;  // [heads]
    std::vector<std::vector<uint16_t>> to;  // [heads]: clusters of main_; empty: the same
  };
  struct Kept {
    std::mutex mutex;
    bool found = false;
    std::vector<uint16_t> clusters;
    MemoryCharge memory;
  };

  std::vector<Part> parts_;
  std::shared_ptr<const std::vector<Clustering>> main_;
  SummarySet summaries_;
  DType dtype_ = DType::kBf16;  // of the keys
  TokenRange mid_;
  mutable std::vector<Kept> of_mid_;  // [heads]
  MemoryAccount account_;
  MemoryCharge memory_;
};

}  // namespace prefixd
