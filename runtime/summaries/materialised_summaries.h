// Makes the summaries that estimators read at a step, for the whole mid region of a prefix: it
// reduces the gathered summaries to what each variant keeps. Where a prefix ends with a segment,
// ingest makes and stores the moment variants ("kept.<variant>"), so that attaching reads a few
// bytes per head; for other lengths attaching makes them.
//
// Thread-safety: free functions; concurrent calls are fine.
#pragma once

#include <map>
#include <memory>
#include <span>
#include <vector>

#include "base/memory_budget.h"
#include "prefixd/estimator_variant.h"
#include "runtime/derived/query_samples.h"
#include "runtime/summaries/clusterings.h"
#include "runtime/summaries/summaries.h"

namespace prefixd {

// Holds what one variant keeps of one head's mid region, with what it borrows.
struct KeptSummary {
  EstimatorSummary summary;
  std::shared_ptr<const PrefixClusters> clusters;  // for estimators by clusters
  MemoryCharge memory;
};
// By variant (their Kept() names) and head. Variants keep only the heads that ask for them.
using KeptSummaries =
    std::map<EstimatorVariant, std::map<size_t, std::shared_ptr<const KeptSummary>>>;
using HeadsOfVariants = std::map<EstimatorVariant, std::vector<size_t>>;

// Describes a prefix, or a beginning of one, whose mid region is summarised.
struct SummarySource {
  const DerivedContext& context;
  const Model& model;
  const storage::StoredPrefix& prefix;
  const std::vector<SegmentPart>& parts;  // the prefix's chain
  TokenRange mid;
  const FeatureMapSet* maps = nullptr;  // phi only
  uint64_t max_added = 0;               // see AssembleSummaries
  WorkPriority priority = WorkPriority::kStep;
  std::vector<storage::ReadStats>* reads = nullptr;
  MemoryAccount memory = {};  // for what is kept, and for what is gathered meanwhile
  // Clusters that other sessions have assembled; null: none are shared.
  std::weak_ptr<const PrefixClusters>* clusters = nullptr;
};

// Returns the summaries of `wanted` (by their Kept() names), from stored blobs where there are any;
// none for kNone, kAuto and heads of layers without summaries. kFailedPrecondition when the store
// does not gather what one of them keeps, or has not done so yet; kResourceExhausted when they do
// not fit into memory.
Result<KeptSummaries> LoadMaterialised(const SummarySource& source, const HeadsOfVariants& wanted);

// Returns the variants whose materialised summaries this store keeps as blobs: the moment
// estimators that it builds, and the plain one always.
std::vector<EstimatorVariant> MaterialisedMoments(const RuntimeOptions& options);
std::string MaterialisedBlobName(const EstimatorVariant& variant);
// Makes the missing materialised summaries of the prefix that ends with `segment`, and stores them.
Status BuildMaterialised(const DerivedContext& context, const Model& model,
                         const storage::StoredPrefix& prefix, const SegmentPart& segment,
                         const QuerySamples* samples, WorkProgress& progress);

// Returns the root mean square of each channel of a KV head's queries; empty without samples.
std::vector<float> QueryRms(const QuerySamples* samples, const Model& model, size_t head);

// Checks that the store gathers what the variant keeps.
Status CheckGathered(const RuntimeOptions& options, const EstimatorVariant& variant);

}  // namespace prefixd
