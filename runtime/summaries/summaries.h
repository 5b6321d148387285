// Computes the summaries of a stored prefix's mid region from the checkpoints beside its segments.
//
// A segment keeps cumulative checkpoints: summaries of its own tokens up to a position, sinks left
// out. Disjoint sets merge and nothing is ever subtracted (docs/mathematics.md, "only ever add"):
// for each segment of the chain the last checkpoint that fits is loaded, and the rows from it to
// the end of the mid region (or of the segment's use) are added. Checkpoints gather the most that
// any configured estimator needs; each estimator keeps its part (materialised_summaries.h).
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

// Returns the positions of a segment's checkpoints: every checkpoint_tokens from its start, its
// end, and n_tail before its end (where the mid region of a prefix ending here ends). Ascending;
// only positions past the sinks.
std::vector<uint32_t> CheckpointPositions(TokenRange segment, Anchors anchors,
                                          uint32_t checkpoint_tokens);

// One summary per head, by Model::heads; heads of layers without summaries stay empty.
using SummarySet = std::vector<EstimatorSummary>;

// Describes a head without a summary.
EstimatorSpec EmptySpec(const Model& model, size_t head);

// Some of the heads: [heads]; empty: all of them.
using HeadSet = std::vector<bool>;

// Describes what checkpoints gather: names and producer of the blobs, and how each head's summary
// is built. Borrows the model (and maps); clusterings belong to one segment.
class SummaryKind {
 public:
  static SummaryKind Moments(const Model& model, const RuntimeOptions& options);
  static SummaryKind Phi(const Model& model, const FeatureMapSet& maps,
                         const RuntimeOptions& options);
  // clusterings: [heads], all of one segment (clusterings.h).
  static SummaryKind Clusters(const Model& model, const std::vector<Clustering>& clusterings,
                              const RuntimeOptions& options);

  std::string BlobName(uint32_t position) const { return prefix_ + std::to_string(position); }
  const std::string& prefix() const { return prefix_; }
  const std::string& producer() const { return producer_; }
  const Model& model() const { return model_; }
  const EstimatorSpec& spec(size_t head) const { return specs_[head]; }
  // Returns the maps whose stored features build the phi caches; null where the store keeps none.
  const FeatureMapSet* stored_features() const { return features_ ? maps_ : nullptr; }
  const FeatureFormat& feature_format() const { return *features_; }
  Result<SummarySet> Empty() const;

  // Leaves all heads but these empty: they are neither loaded nor made.
  SummaryKind Only(HeadSet heads) &&;
  bool Has(size_t head) const {
    return model_.Summarised(model_.heads.layer_of(head)) && (only_.empty() || only_[head]);
  }
  // Returns about the memory that the summaries of one set take.
  uint64_t MemoryBytes() const;

 private:
  SummaryKind(const Model& model, std::string prefix, std::string producer)
      : model_(model), prefix_(std::move(prefix)), producer_(std::move(producer)) {}

  const Model& model_;
  std::string prefix_, producer_;
  const FeatureMapSet* maps_ = nullptr;
  std::optional<FeatureFormat> features_;
  std::vector<EstimatorSpec> specs_;  // [heads]
  HeadSet only_;
};

// Packs all heads' summaries into one blob, and unpacks it. Heads of layers without summaries take
// no space.
//   spec(head): the EstimatorSpec of what is stored; nullopt leaves the head empty.
std::vector<std::byte> PackSummaries(const Model& model, const std::string& producer,
                                     const SummarySet& summaries);
using SpecOfHead = std::function<std::optional<EstimatorSpec>(size_t head)>;
Result<SummarySet> UnpackSummaries(const Model& model, const std::string& producer,
                                   const SpecOfHead& spec, std::span<const std::byte> blob,
                                   std::vector<storage::ReadStats>* reads);

// Writes the checkpoints of a segment that are missing, damaged or by another producer. The segment
// is the end of `prefix`, which is open at its full length. Counts heads in `progress`.
Status BuildCheckpoints(const DerivedContext& context, const SummaryKind& kind,
                        const storage::StoredPrefix& prefix, const SegmentPart& segment,
                        WorkProgress& progress);

// Returns the summaries of `mid`, a region that begins behind the sinks, for all heads.
//   max_added: rows that may be added per head and segment where checkpoints do not reach; beyond
//   it kFailedPrecondition tells the caller to wait for the ingest.
//   reads: [heads] or null; physical reads are added to it.
Result<SummarySet> AssembleSummaries(const DerivedContext& context, const SummaryKind& kind,
                                     const storage::StoredPrefix& prefix,
                                     const std::vector<SegmentPart>& parts, TokenRange mid,
                                     uint64_t max_added, WorkPriority priority,
                                     std::vector<storage::ReadStats>* reads);

}  // namespace prefixd
