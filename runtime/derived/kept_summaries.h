// What estimators read at a step, of the whole mid region of one prefix: made from what was
// gathered, reduced to what each variant keeps. For a prefix that ends where a segment ends the
// variants of moments are made at ingest and stored ("kept.<variant>"), so that attaching reads a
// few bytes per head; for other lengths they are made when they are attached.
//
// Thread-safety: free functions; concurrent calls are fine.
#pragma once

#include <map>
#include <memory>
#include <span>
#include <vector>

#include "prefixd/estimator_variant.h"
#include "runtime/derived/clusterings.h"
#include "runtime/derived/query_samples.h"
#include "runtime/derived/summaries.h"

namespace prefixd {

// Of all heads, with what they borrow.
struct KeptSummaries {
  SummarySet heads;
  std::shared_ptr<const PrefixClusters> clusters;  // of the estimators by clusters
};

// A prefix, or a beginning of it, whose mid region is summarised.
struct SummarySource {
  const DerivedContext& context;
  const Model& model;
  const storage::StoredPrefix& prefix;
  const std::vector<SegmentPart>& parts;  // of its chain
  TokenRange mid;
  const FeatureMapSet* maps = nullptr;  // for phi
  uint64_t max_added = 0;               // AssembleSummaries
  WorkPriority priority = WorkPriority::kStep;
  std::vector<storage::ReadStats>* reads = nullptr;
};

// Each of `variants` (as Kept() names them), from stored blobs as far as there are any.
// kFailedPrecondition when the store does not gather what one of them keeps, or not yet.
using KeptByVariant = std::map<EstimatorVariant, std::shared_ptr<const KeptSummaries>>;
Result<KeptByVariant> LoadKept(const SummarySource& source,
                               std::span<const EstimatorVariant> variants);

// What this store makes "kept" blobs of: the moment estimators it builds, plain ones always.
std::vector<EstimatorVariant> KeptMoments(const RuntimeOptions& options);
std::string KeptBlobName(const EstimatorVariant& variant);
// Makes those of the prefix that ends with `segment`, as far as they are not there.
Status BuildKept(const DerivedContext& context, const Model& model,
                 const storage::StoredPrefix& prefix, const SegmentPart& segment,
                 const QuerySamples* samples, WorkProgress& progress);

// Root mean square of each channel of a KV head's queries; empty without samples.
std::vector<float> QueryRms(const QuerySamples* samples, const KvGeometry& geometry, size_t head);

// Whether the store gathers what the variant keeps.
Status CheckGathered(const RuntimeOptions& options, const EstimatorVariant& variant);

}  // namespace prefixd
