// Estimates the remainder by clusters of keys: centroids, and the selector's own scan
// (docs/mathematics.md). Retrieved rows leave their clusters exactly.
#include <algorithm>
#include <cmath>
#include <limits>

#include "attention/estimators/remainder.h"
#include "attention/estimators/tilt.h"
#include "attention/kernels/kernels.h"

namespace prefixd {
namespace {

constexpr double kInfMass = std::numeric_limits<double>::infinity();

double Dot(std::span<const float> q, const double* x) {
  double dot = 0;
  for (size_t j = 0; j < q.size(); ++j) dot += q[j] * x[j];
  return dot;
}

// The clusters without the retrieved rows, for all heads of a group.
class RemainingClusters {
 public:
  explicit RemainingClusters(const RemainderContext& context)
      : context_(context), summary_(*context.in.clusters) {
    const GroupStepInput& in = context.in;
    clusters_.assign(in.retrieved_clusters.begin(), in.retrieved_clusters.end());
    if (clusters_.empty() && context.k() > 0) clusters_ = in.clustering->Assign(in.retrieved);
    left_.assign(summary_.counts().begin(), summary_.counts().end());
    for (uint16_t c : clusters_) left_[c] -= 1;
    if (in.estimator != EstimatorKind::kScan) RemoveSpread();
  }

  uint32_t size() const { return summary_.size(); }
  uint16_t cluster_of(size_t i) const { return clusters_[i]; }
  // Returns the tokens left in a cluster. Below 1 the cluster is empty (negative only if the given
  // clusters are not the summary's).
  double left(uint32_t c) const { return left_[c]; }

  // Returns the mean score of the rest of each cluster, under head g. REQUIRES keys.
  std::vector<double> MeanScores(uint32_t g) const {
    const double scale = context_.in.layer.scale;
    std::vector<double> mean(size()), removed(size());
    for (uint32_t c = 0; c < size(); ++c) {
      mean[c] = scale *
                Dot(context_.query(g), summary_.mean_keys().data() + size_t{c} * context_.key_dim);
    }
    const std::span<const float> s = context_.scores_of(g);
    for (size_t i = 0; i < s.size(); ++i) removed[clusters_[i]] += s[i] - mean[clusters_[i]];
    for (uint32_t c = 0; c < size(); ++c) {
      if (left_[c] >= 1) mean[c] -= removed[c] / left_[c];
    }
    return mean;
  }

  // Returns the variance of the scores of the rest of cluster c, under head g.
  double ScoreVariance(uint32_t c, uint32_t g) const {
    const double scale = context_.in.layer.scale;
    // The spread is taken to be the same in all directions.
    const double of_channel = spread_[c] / context_.key_dim;
    double sum = 0;
    for (float q : context_.query(g)) sum += scale * scale * q * q * of_channel;
    return left_[c] > 1 ? sum / left_[c] : 0.0;
  }

 private:
  void RemoveSpread() {
    const RowsView& rows = context_.in.retrieved;
    const uint32_t dk = context_.key_dim;
    spread_.assign(summary_.spreads().begin(), summary_.spreads().end());
    std::vector<double> shift(size_t{size()} * dk);
    std::vector<float> key(dk);
    for (size_t i = 0; i < rows.count; ++i) {
      Kernels().to_float(rows.shape.dtype, rows.key(i), dk, key.data());
      const size_t c = clusters_[i];
      for (uint32_t j = 0; j < dk; ++j) {
        const double d = key[j] - summary_.mean_keys()[c * dk + j];
        shift[c * dk + j] += d;
        spread_[c] -= d * d;
      }
    }
    for (uint32_t c = 0; c < size(); ++c) {
      for (uint32_t j = 0; j < dk && left_[c] >= 1; ++j) {
        const double d = shift[size_t{c} * dk + j];
        spread_[c] -= d * d / left_[c];
      }
    }
    for (size_t c = 0; c < spread_.size(); ++c) {
      if (spread_[c] < kNegligibleSpread * summary_.spreads()[c]) spread_[c] = 0;
    }
  }

  const RemainderContext& context_;
  const ClusterSummary& summary_;
  std::vector<uint16_t> clusters_;  // [K]
  std::vector<double> left_;        // [n]
  std::vector<double> spread_;      // [n]
};

// Returns log Z of each cluster's remainder, by the tilted mean and spread of its scores.
std::vector<double> CentroidMasses(const RemainderContext& context,
                                   const RemainingClusters& clusters,
                                   const std::vector<double>& mean, uint32_t g) {
  std::vector<double> log_z(clusters.size(), -kInfMass);
  for (uint32_t c = 0; c < clusters.size(); ++c) {
    if (clusters.left(c) < 1) continue;
    const double variance = clusters.ScoreVariance(c, g);
    const double cut = TiltCut(context.cut(g), mean[c], std::sqrt(variance), clusters.left(c));
    const double log_mean = TiltScores(mean[c], variance, cut).log_mean;
    log_z[c] = std::log(clusters.left(c)) + std::max(log_mean, mean[c]);  // Jensen's bound
  }
  return log_z;
}

// Returns log Z of each cluster's remainder by the scan's scores, less those of the retrieved rows.
std::vector<double> ScanMassesLeft(const RemainderContext& context,
                                   const RemainingClusters& clusters, uint32_t g) {
  const ScanMasses& scan = context.in.scan;
  const Cut cut = context.cut(g);
  const std::span<const float> masses =
      scan.log_mass.subspan(size_t{g} * clusters.size(), clusters.size());
  const double shift = *std::max_element(masses.begin(), masses.end());
  std::vector<double> log_z(clusters.size(), -kInfMass), mass(clusters.size());
  if (!std::isfinite(shift)) return log_z;
  for (uint32_t c = 0; c < clusters.size(); ++c) mass[c] = std::exp(masses[c] - shift);
  for (size_t i = 0; i < context.k(); ++i) {
    const float s = scan.retrieved_scores[g * context.k() + i];
    mass[clusters.cluster_of(i)] -= std::exp(std::min(s, cut.score) - shift);
  }
  for (uint32_t c = 0; c < clusters.size(); ++c) {
    // The rest of a cluster that was retrieved almost whole is rounding noise.
    if (clusters.left(c) >= 1 && mass[c] > 1e-6 * std::exp(masses[c] - shift)) {
      log_z[c] = shift + std::log(mass[c]);
    }
  }
  return log_z;
}

double LogSumExp(const std::vector<double>& x) {
  const double max = *std::max_element(x.begin(), x.end());
  if (max == -kInfMass) return -kInfMass;
  double sum = 0;
  for (double v : x) sum += std::exp(v - max);
  return max + std::log(sum);
}

}  // namespace

Remainder EstimateClusters(const RemainderContext& context) {
  const GroupStepInput& in = context.in;
  const ClusterSummary& summary = *in.clusters;
  const RemainingClusters clusters(context);
  const size_t k = context.k();
  const double r = context.remaining();
  Remainder out = EmptyCoefficients(context);
  for (uint32_t g = 0; g < context.group(); ++g) {
    double mean_score = MeanRemainingScore(context, g);
    std::vector<double> mean;
    if (summary.has_keys()) {
      mean = clusters.MeanScores(g);
      mean_score = 0;
      for (uint32_t c = 0; c < clusters.size(); ++c) {
        if (clusters.left(c) >= 1) mean_score += clusters.left(c) * mean[c] / r;
      }
    }
    const std::vector<double> log_z = in.estimator == EstimatorKind::kScan
                                          ? ScanMassesLeft(context, clusters, g)
                                          : CentroidMasses(context, clusters, mean, g);
    const double estimate = LogSumExp(log_z);
    out.log_z[g] = ClampToBracket(estimate, context.cut(g), mean_score, r);
    if (out.log_z[g] == -kInfMass) continue;

    // y_R = sum_c w_c (n_c vbar_c - sum_{i in K of c} v_i) / r_c, with w_c the share of each
    // cluster; without any estimate of the masses every token weighs the same.
    double* constant = out.constant.data() + size_t{g} * context.value_dim;
    std::vector<double> weight(clusters.size());  // w_c / r_c
    for (uint32_t c = 0; c < clusters.size(); ++c) {
      if (clusters.left(c) < 1) continue;
      weight[c] = estimate == -kInfMass ? 1 / r : std::exp(log_z[c] - estimate) / clusters.left(c);
      const double n = weight[c] * static_cast<double>(summary.counts()[c]);
      const double* value = summary.mean_values().data() + size_t{c} * context.value_dim;
      for (uint32_t l = 0; l < context.value_dim; ++l) constant[l] += n * value[l];
    }
    float* coefficient = out.coefficient.data() + g * k;
    for (size_t i = 0; i < k; ++i) {
      coefficient[i] = static_cast<float>(weight[clusters.cluster_of(i)]);
    }
  }
  return out;
}

}  // namespace prefixd
