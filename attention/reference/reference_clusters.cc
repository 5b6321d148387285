// Estimates by clusters, from the remainder's own rows in float64.
#include <algorithm>
#include <cmath>
#include <limits>

#include "attention/estimators/normal.h"
#include "attention/estimators/remainder.h"
#include "attention/estimators/tilt.h"
#include "attention/reference/reference.h"

namespace prefixd::reference {
namespace {

using Vector = std::vector<double>;

constexpr double kInfLog = std::numeric_limits<double>::infinity();

Vector Wide(DType dtype, const std::byte* data, size_t n) {
  std::vector<float> x(n);
  ToFloat(dtype, data, x);
  return {x.begin(), x.end()};
}

// Returns the nearest centre, ties to the lowest.
uint32_t Nearest(const Clustering& clustering, const Vector& key) {
  uint32_t best = 0;
  double least = kInfLog;
  for (uint32_t c = 0; c < clustering.size(); ++c) {
    double distance = 0;
    for (size_t j = 0; j < key.size(); ++j) {
      const double d = key[j] - double{clustering.centre(c)[j]};
      distance += d * d;
    }
    if (distance < least) {
      least = distance;
      best = c;
    }
  }
  return best;
}

struct Cluster {
  std::vector<Vector> keys;
  Vector scores, value_sum;
};

Vector MeanOf(const std::vector<Vector>& rows) {
  Vector mean(rows.front().size());
  for (const Vector& row : rows) {
    for (size_t j = 0; j < mean.size(); ++j) mean[j] += row[j] / double(rows.size());
  }
  return mean;
}

// Returns the variance of the scores as the summary keeps it: by one number for all channels.
// whole: the cluster's spread in the mid region; a negligible share of it counts as none.
double ScoreVariance(const Cluster& cluster, const Vector& scaled_query, double whole) {
  const Vector mean = MeanOf(cluster.keys);
  double spread = 0, norm = 0;
  for (size_t j = 0; j < mean.size(); ++j) {
    for (const Vector& key : cluster.keys) spread += (key[j] - mean[j]) * (key[j] - mean[j]);
    norm += scaled_query[j] * scaled_query[j];
  }
  if (spread < kNegligibleSpread * whole) return 0;
  return norm * spread / double(mean.size()) / double(cluster.keys.size());
}

// Returns log of the mean of exp(score) below the cut, for scores of that mean and variance.
double LogMean(double mu, double variance, double c) {
  if (!(c > mu) || !(variance > kNegligibleVariance)) return mu;
  return mu + variance / 2 + LogNormalCdf((c - mu - variance) / std::sqrt(variance));
}

}  // namespace

Estimate EstimateClusters(const GroupStepInput& in, uint32_t g, const RowsView& rest) {
  const size_t dk = rest.shape.key_dim, dv = rest.shape.value_dim, r = rest.count;
  const Cut cut = in.cuts.empty() ? Cut{} : in.cuts[g];
  Vector scaled_query(dk);
  for (size_t j = 0; j < dk; ++j) {
    scaled_query[j] = double{in.layer.scale} * double{in.queries[g * dk + j]};
  }
  std::vector<Cluster> clusters(in.clustering->size());
  double mean_score = 0;
  for (size_t i = 0; i < r; ++i) {
    const Vector key = Wide(rest.shape.dtype, rest.key(i), dk);
    const Vector value = Wide(rest.shape.dtype, rest.value(i), dv);
    Cluster& cluster = clusters[Nearest(*in.clustering, key)];
    double score = 0;
    for (size_t j = 0; j < dk; ++j) score += scaled_query[j] * key[j];
    mean_score += score / double(r);
    cluster.keys.push_back(key);
    cluster.scores.push_back(score);
    cluster.value_sum.resize(dv);
    for (size_t l = 0; l < dv; ++l) cluster.value_sum[l] += value[l];
  }

  const bool scan = in.estimator == EstimatorKind::kScan;
  Vector log_z;
  for (size_t at = 0; at < clusters.size(); ++at) {
    const Cluster& cluster = clusters[at];
    const size_t n = cluster.keys.size();
    double mass = -kInfLog;
    if (n > 0 && scan) {
      double sum = 0;
      for (double s : cluster.scores) sum += std::exp(std::min(s, double{cut.score}));
      mass = std::log(sum);
    } else if (n > 0) {
      double mu = 0;
      for (double s : cluster.scores) mu += s / double(n);
      const double variance =
          n > 1 ? ScoreVariance(cluster, scaled_query, in.clusters->spreads()[at]) : 0.0;
      double c = cut.score;
      if (cut.kind == CutKind::kNone) {
        c = std::min(c, mu + std::sqrt(variance) * std::sqrt(2 * std::log(double(n))));
      }
      const double mean = LogMean(mu, variance, c);
      mass = std::log(double(n)) + std::max(mean, mu);  // Jensen's bound
    }
    log_z.push_back(mass);
  }
  double total = 0;
  for (double mass : log_z) total += std::exp(mass);
  Estimate out{std::log(total), Vector(dv), 1};
  for (size_t c = 0; c < clusters.size(); ++c) {
    if (clusters[c].keys.empty()) continue;
    const double weight = std::exp(log_z[c] - out.log_z) / double(clusters[c].keys.size());
    for (size_t l = 0; l < dv; ++l) out.y[l] += weight * clusters[c].value_sum[l];
  }
  const double log_count = std::log(double(r));
  if (cut.kind != CutKind::kNone) out.log_z = std::min(out.log_z, log_count + cut.score);
  if (!scan || in.moment) out.log_z = std::max(out.log_z, log_count + mean_score);
  return out;
}

}  // namespace prefixd::reference
