// Summaries of a stored prefix's mid region, put together from what lies beside its segments.
//
// A segment keeps cumulative checkpoints: the summary of its own tokens up to a position, sinks
// left out. Disjoint sets merge and nothing is ever subtracted (spec §3, "only ever add"): for
// each segment of the chain the last checkpoint that still fits is loaded, and the rows between it
// and where the mid region (or the segment's use) ends are added. What is gathered is the most that
// any configured estimator needs; each keeps its part of it (kept_summaries.h).
//
// Thread-safety: free functions; concurrent calls are fine.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "attention/estimators/estimator.h"
#include "prefixd/options.h"
#include "prefixd/partition.h"
#include "prefixd/result.h"
#include "runtime/derived/derived_context.h"
#include "runtime/derived/models.h"
#include "runtime/derived/segment_parts.h"
#include "runtime/work/work_progress.h"

namespace prefixd {

// Where a segment's checkpoints lie: every checkpoint_tokens from its start, at its end, and
// n_tail before its end (where the mid region of a prefix ending here ends). Ascending; only
// positions past the sinks.
std::vector<uint32_t> CheckpointPositions(TokenRange segment, Anchors anchors,
                                          uint32_t checkpoint_tokens);

// Of all heads, index layer * n_kv_heads + kv_head; those of layers without summaries stay empty.
using SummarySet = std::vector<EstimatorSummary>;

// What is gathered: how its blobs are named, who made them, and how each head's is built. Borrows
// the model (and maps); a clustering is one segment's.
class SummaryKind {
 public:
  static SummaryKind Moments(const Model& model, const RuntimeOptions& options);
  static SummaryKind Phi(const Model& model, const FeatureMapSet& maps,
                         const RuntimeOptions& options);
  // clusterings: of one segment, [heads] (clusterings.h).
  static SummaryKind Clusters(const Model& model, const std::vector<Clustering>& clusterings,
                              const RuntimeOptions& options);

  std::string BlobName(uint32_t position) const { return prefix_ + std::to_string(position); }
  const std::string& prefix() const { return prefix_; }
  const std::string& producer() const { return producer_; }
  const Model& model() const { return model_; }
  const EstimatorSpec& spec(size_t head) const { return specs_[head]; }
  // Phi caches are built from stored features of these maps, where the store keeps some.
  const FeatureMapSet* stored_features() const { return features_ ? maps_ : nullptr; }
  const FeatureFormat& feature_format() const { return *features_; }
  Result<SummarySet> Empty() const;

 private:
  SummaryKind(const Model& model, std::string prefix, std::string producer)
      : model_(model), prefix_(std::move(prefix)), producer_(std::move(producer)) {}

  const Model& model_;
  std::string prefix_, producer_;
  const FeatureMapSet* maps_ = nullptr;
  std::optional<FeatureFormat> features_;
  std::vector<EstimatorSpec> specs_;  // [heads]
};

// One blob of all heads' summaries, and back. Heads of layers without summaries take no room.
//   specs(head) -> EstimatorSpec of what is stored.
std::vector<std::byte> PackSummaries(const Model& model, const std::string& producer,
                                     const SummarySet& summaries);
using SpecOfHead = std::function<EstimatorSpec(size_t head)>;
Result<SummarySet> UnpackSummaries(const Model& model, const std::string& producer,
                                   const SpecOfHead& spec, std::span<const std::byte> blob,
                                   std::vector<storage::ReadStats>* reads);

// Writes the checkpoints of a segment that are not stored yet (or by another producer, or
// damaged): the segment is the end of `prefix`, which is open at its full length. Counts heads in
// `progress`.
Status BuildCheckpoints(const DerivedContext& context, const SummaryKind& kind,
                        const storage::StoredPrefix& prefix, const SegmentPart& segment,
                        WorkProgress& progress);

// The summaries of `mid`, a region that begins behind the sinks, for all heads.
//   max_added: rows that may be added per head and segment where checkpoints do not reach; beyond
//   it kFailedPrecondition asks to wait for the ingest.
//   reads: [heads] if not null; physical reads are added to it.
Result<SummarySet> AssembleSummaries(const DerivedContext& context, const SummaryKind& kind,
                                     const storage::StoredPrefix& prefix,
                                     const std::vector<SegmentPart>& parts, TokenRange mid,
                                     uint64_t max_added, WorkPriority priority,
                                     std::vector<storage::ReadStats>* reads);

}  // namespace prefixd
