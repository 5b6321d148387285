// The partitions of keys behind the estimators by clusters: one per (segment, layer, KV head), fit
// to a sample of the segment's own keys when it is ingested, so that no segment depends on how
// another was clustered. Where a prefix has several, the largest segment's is the prefix's, and the
// others' clusters go, whole, to its nearest ones: exact, and of fixed size however long the chain.
//
// Thread-safety: free functions and const methods may be called concurrently.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "attention/estimators/clusters.h"
#include "index/search/key_reader.h"
#include "runtime/derived/summaries.h"

namespace prefixd {

// Fits and stores what is not there yet: the segment is the end of `prefix`. Counts heads.
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
  // Loads clusterings and checkpoints of the chain.
  static Result<std::shared_ptr<const PrefixClusters>> Assemble(
      const DerivedContext& context, const Model& model, const storage::StoredPrefix& prefix,
      const std::vector<SegmentPart>& parts, TokenRange mid, uint64_t max_added,
      WorkPriority priority, std::vector<storage::ReadStats>* reads);

  // As gathered, of all heads; they borrow from this.
  const SummarySet& summaries() const { return summaries_; }
  const Clustering& clustering(size_t head) const { return main_->at(head); }
  // Of a run of tokens of the mid region, given their keys.
  std::vector<uint16_t> Of(size_t head, TokenRange run, const RowsView& keys) const;
  // Of the whole mid region, by the head's `keys`. Found once and kept.
  Result<std::span<const uint16_t>> OfMid(size_t head, index::KeyReader& keys) const;

 private:
  struct Part {
    TokenRange range;                                            // of the mid region
    std::shared_ptr<const std::vector<Clustering>> clusterings;  // [heads]
    std::vector<std::vector<uint16_t>> to;  // [heads]: clusters of main_; empty: the same
  };
  struct Kept {
    std::mutex mutex;
    bool found = false;
    std::vector<uint16_t> clusters;
  };

  std::vector<Part> parts_;
  std::shared_ptr<const std::vector<Clustering>> main_;
  SummarySet summaries_;
  RowShape key_;
  TokenRange mid_;
  mutable std::vector<Kept> of_mid_;  // [heads]
};

}  // namespace prefixd
