// Random groups for the CUDA step, with summaries of every kind.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "attention/step/step.h"
#include "tests/support/random_kv.h"

namespace prefixd::gpu::testing {

using prefixd::testing::OwnedRows;
using prefixd::testing::Random;

struct ShapeSpec {
  uint32_t group = 1;
  RowShape row;
  float softcap = 0;
  uint32_t d_phi = 8, d_emb = 8;
  float query_scale = 1;
};
// Dimensions up to max_dim, group sizes up to 16; every dtype.
ShapeSpec RandomShape(Random& random, uint32_t max_dim);

// One group with everything its input borrows.
struct Group {
  std::vector<float> queries;
  OwnedRows sinks, tail, mid, retrieved;
  std::vector<Cut> cuts;
  std::unique_ptr<MomentSummary> moment;
  std::unique_ptr<PhiCache> phi;
  std::vector<FeatureMap> phi_q;
  std::unique_ptr<FeatureMap> phi_k;
  std::vector<std::byte> features;
  std::vector<float> feature_m;
  std::vector<uint32_t> feature_chunks;
  FeatureFormat feature_format;
  std::unique_ptr<Clustering> clustering;
  std::unique_ptr<ClusterSummary> clusters;
  std::vector<uint16_t> retrieved_clusters;
  std::vector<float> scan_log_mass, scan_scores;
  GroupStepInput input;
};
enum class CutSource { kNone, kExact, kApproximate };
struct GroupSpec {
  uint32_t sinks = 4, tail = 16, mid = 0, k = 0;
  EstimatorKind estimator = EstimatorKind::kNone;
  CutSource cuts = CutSource::kNone;
  bool with_mean = false;  // other than moment: with the mean key, for the bracket
  bool identical_keys = false;
  // moment
  bool cross = true, covariance = false;
  uint32_t rank = 0;  // of C's factor; 0, or too large for the dimensions: all of it
  // phi
  PhiForm phi_form = PhiForm::kSigned;
  bool symmetric = false;
  std::optional<FeatureFormat> stored;  // features read instead of recomputed
  // clusters
  uint32_t clusters = 6;
  bool clusters_given = true;  // else found from the retrieved keys
};
Group MakeGroup(Random& random, const ShapeSpec& shape, const GroupSpec& spec);
// Any kind and form.
GroupSpec RandomSpec(Random& random, uint32_t max_mid, bool softcap);
std::string Describe(const Group& group);

}  // namespace prefixd::gpu::testing
