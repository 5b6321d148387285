#include "runtime/step/estimator_input.h"

namespace prefixd {

void EstimatorInput::Attach(const EstimatorVariant& estimator, const EstimatorSummary& summary,
                            const FeatureMapSet* maps, size_t head, GroupStepInput& step) {
  summary.AttachTo(step);
  step.phi_form = estimator.phi_form;
  if (estimator.kind == EstimatorKind::kPhi && !maps->phi_q.empty()) {
    // Maps are for models whose layers have as many heads.
    step.phi_q = std::span(maps->phi_q).subspan(head * step.group, step.group);
  }
}

void EstimatorInput::AttachClusters(std::span<const uint16_t> of_mid,
                                    std::span<const uint32_t> retrieved, GroupStepInput& step) {
  clusters_.resize(retrieved.size());
  for (size_t i = 0; i < retrieved.size(); ++i) clusters_[i] = of_mid[retrieved[i]];
  step.retrieved_clusters = clusters_;
}

void EstimatorInput::AttachScan(std::span<const uint16_t> of_mid, std::span<const float> scores,
                                std::span<const uint32_t> retrieved, GroupStepInput& step) {
  const uint32_t n_clusters = step.clusters->size();
  log_mass_.resize(size_t{step.group} * n_clusters);
  SumScan(scores, step.group, of_mid, step.cuts, n_clusters, log_mass_);
  const size_t k = retrieved.size();
  retrieved_scores_.resize(step.group * k);
  for (uint32_t g = 0; g < step.group; ++g) {
    for (size_t i = 0; i < k; ++i) {
      retrieved_scores_[g * k + i] = scores[g * of_mid.size() + retrieved[i]];
    }
  }
  step.scan = {log_mass_, retrieved_scores_, true};
}

}  // namespace prefixd
