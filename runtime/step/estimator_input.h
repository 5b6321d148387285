// Puts an estimator's summaries into the input of a step, and owns what only this step needs.
//
// Thread-safety: plain value, used for one step.
#pragma once

#include <span>
#include <vector>

#include "attention/step/step.h"
#include "runtime/derived/kept_summaries.h"
#include "runtime/derived/token_features.h"

namespace prefixd {

class EstimatorInput {
 public:
  // Of head layer * n_kv_heads + kv_head. `summaries` outlive the step; step.retrieved is set.
  void Attach(const EstimatorVariant& estimator, const KeptSummaries& summaries,
              const FeatureMapSet* maps, const KvGeometry& geometry, size_t head,
              GroupStepInput& step);
  // Estimators by clusters, after Attach: which cluster each retrieved row is of.
  //   of_mid: of the mid region's tokens; retrieved: which of them the step's retrieved rows are.
  void AttachClusters(std::span<const uint16_t> of_mid, std::span<const uint32_t> retrieved,
                      GroupStepInput& step);
  // kScan, after AttachClusters: the selector's scores [G][mid], summed by cluster under the
  // step's cuts.
  void AttachScan(std::span<const uint16_t> of_mid, std::span<const float> scores,
                  std::span<const uint32_t> retrieved, GroupStepInput& step);

  // kPhi, after Attach: the retrieved tokens' stored features.
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
