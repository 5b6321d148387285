// Puts an estimator's summaries into the input of a step, and owns the buffers of this one step.
//
// Thread-safety: plain value, used for one step.
#pragma once

#include <span>
#include <vector>

#include "attention/step/step.h"
#include "runtime/summaries/materialised_summaries.h"
#include "runtime/summaries/token_features.h"

namespace prefixd {

class EstimatorInput {
 public:
  // Attaches the summary of a head (Model::heads), which outlives the step; step.retrieved and
  // step.group must be set.
  void Attach(const EstimatorVariant& estimator, const EstimatorSummary& summary,
              const FeatureMapSet* maps, size_t head, GroupStepInput& step);
  // Call after Attach, for estimators by clusters: gives each retrieved row its cluster.
  //   of_mid: clusters of the mid region's tokens; retrieved: indexes into it, one per retrieved
  //   row.
  void AttachClusters(std::span<const uint16_t> of_mid, std::span<const uint32_t> retrieved,
                      GroupStepInput& step);
  // Call after AttachClusters, for kScan: sums the selector's scores [G][mid] by cluster, under the
  // step's cuts.
  void AttachScan(std::span<const uint16_t> of_mid, std::span<const float> scores,
                  std::span<const uint32_t> retrieved, GroupStepInput& step);

  // Call after Attach, for kPhi: gathers the retrieved tokens' stored features.
  void AttachFeatures(const TokenFeatures& features, std::span<const uint32_t> ids,
                      GroupStepInput& step) {
    step.features = features.Gather(ids, codes_, chunks_);
  }

 private:
  std::vector<std::byte> codes_;
  std::vector<uint32_t> chunks_;
  std::vector<float> log_mass_, retrieved_scores_;
  std::vector<uint16_t> clusters_;
};

}  // namespace prefixd
