#include "attention/estimators/remainder.h"
#include "attention/rows/limits.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

namespace prefixd {
namespace {

std::string Dims(uint64_t count, uint32_t key_dim, uint32_t value_dim) {
  return std::to_string(count) + " tokens of " + std::to_string(key_dim) + "+" +
         std::to_string(value_dim);
}

Status CheckMoment(const GroupStepInput& in, uint32_t key_dim, uint32_t value_dim) {
  const MomentSummary& moment = *in.moment;
  if (moment.key_dim() != key_dim || moment.value_dim() != value_dim ||
      moment.count() != in.mid_count) {
    return InvalidArgument("the moment summary is of " +
                           Dims(moment.count(), moment.key_dim(), moment.value_dim()) +
                           "; the mid region has " + Dims(in.mid_count, key_dim, value_dim));
  }
  return {};
}

Status CheckStoredFeatures(const GroupStepInput& in) {
  const StoredFeatures& stored = in.features;
  const uint32_t d_phi = in.phi->d_phi();
  const size_t k = in.retrieved.count;
  const size_t chunks = stored.m.size() / d_phi;
  if ((stored.format.bits != 8 && stored.format.bits != 16) ||
      (k > 1 && stored.stride < stored.format.RowBytes(d_phi))) {
    return InvalidArgument("stored features must be 8 or 16 bits, in rows of d_phi");
  }
  if (stored.m.size() % d_phi != 0 || chunks == 0 ||
      (!stored.chunks.empty() && stored.chunks.size() != k) ||
      std::ranges::any_of(stored.chunks, [&](uint32_t c) { return c >= chunks; })) {
    return InvalidArgument("stored features need one m of d_phi per chunk and one chunk per row");
  }
  return {};
}

Status CheckPhi(const GroupStepInput& in, uint32_t key_dim, uint32_t value_dim) {
  const bool stored = in.features.data != nullptr;
  const bool maps = in.phi_q.empty() ? in.phi_k != nullptr : in.phi_q.size() == in.group;
  if (in.phi == nullptr || !maps || (in.phi_k == nullptr && !stored)) {
    return InvalidArgument(
        "the phi estimator needs a cache, one phi_q per query head (none for symmetric maps), and "
        "phi_k or stored features");
  }
  const PhiCache& phi = *in.phi;
  const auto fits = [&](const FeatureMap& map) {
    return map.in_dim == key_dim && map.d_phi == phi.d_phi();
  };
  if (phi.value_dim() != value_dim || (in.phi_k != nullptr && !fits(*in.phi_k)) ||
      !std::ranges::all_of(in.phi_q, fits)) {
    return InvalidArgument("the phi cache, its maps and the rows disagree in dimensions");
  }
  if (phi.count() != in.mid_count) {
    return InvalidArgument("the phi cache is of " + std::to_string(phi.count()) +
                           " tokens; the mid region has " + std::to_string(in.mid_count));
  }
  return stored ? CheckStoredFeatures(in) : Status();
}

Status CheckClusters(const GroupStepInput& in, uint32_t key_dim, uint32_t value_dim) {
  const std::string name(EstimatorName(in.estimator));
  if (in.clusters == nullptr ||
      (in.clustering == nullptr && in.retrieved_clusters.size() != in.retrieved.count)) {
    return InvalidArgument("estimator '" + name +
                           "' needs a cluster summary, and the retrieved rows' clusters or the "
                           "clustering that finds them");
  }
  const ClusterSummary& clusters = *in.clusters;
  const ClusterContents wanted = in.estimator == EstimatorKind::kCentroid
                                     ? ClusterContents::kCentroids
                                     : ClusterContents::kValues;
  if (clusters.contents() < wanted) {
    return InvalidArgument("the cluster summary holds too little for estimator '" + name + "'");
  }
  if (clusters.key_dim() != key_dim || clusters.value_dim() != value_dim ||
      clusters.count() != in.mid_count) {
    return InvalidArgument("the cluster summary is of " +
                           Dims(clusters.count(), clusters.key_dim(), clusters.value_dim()) +
                           "; the mid region has " + Dims(in.mid_count, key_dim, value_dim));
  }
  const auto unknown = [&](uint16_t c) { return c >= clusters.size(); };
  if ((in.clustering != nullptr &&
       (in.clustering->size() != clusters.size() || in.clustering->dim() != key_dim)) ||
      (!in.retrieved_clusters.empty() && in.retrieved_clusters.size() != in.retrieved.count) ||
      std::ranges::any_of(in.retrieved_clusters, unknown)) {
    return InvalidArgument("the cluster summary, the clustering and the rows' clusters disagree");
  }
  if (in.estimator != EstimatorKind::kScan) return {};
  if (!in.scan.complete) {
    return InvalidArgument(
        "estimator 'scan' needs a scan of every key; after a pruned one use the moments");
  }
  if (in.scan.log_mass.size() != size_t{in.group} * clusters.size() ||
      in.scan.retrieved_scores.size() != in.group * in.retrieved.count) {
    return InvalidArgument("scan masses must be [group][clusters], its scores [group][retrieved]");
  }
  return {};
}

}  // namespace

Status CheckEstimatorInputs(const GroupStepInput& in, uint32_t key_dim, uint32_t value_dim) {
  if (in.estimator == EstimatorKind::kMoment && in.moment == nullptr) {
    return InvalidArgument("the moment estimator needs a moment summary");
  }
  if (in.moment != nullptr) PREFIXD_TRY(CheckMoment(in, key_dim, value_dim));
  switch (in.estimator) {
    case EstimatorKind::kPhi:
      return CheckPhi(in, key_dim, value_dim);
    case EstimatorKind::kCentroid:
    case EstimatorKind::kScan:
      return CheckClusters(in, key_dim, value_dim);
    default:
      return {};
  }
}

bool NeedsKeySums(const GroupStepInput& in) {
  return in.estimator == EstimatorKind::kMoment && !in.moment->has_covariance();
}

Remainder Estimate(const RemainderContext& context) {
  switch (context.in.estimator) {
    case EstimatorKind::kMoment:
      return EstimateMoment(context);
    case EstimatorKind::kPhi:
      return EstimatePhi(context);
    case EstimatorKind::kCentroid:
    case EstimatorKind::kScan:
      return EstimateClusters(context);
    default:
      return EmptyLines(context);
  }
}

Remainder EmptyLines(const RemainderContext& context) {
  const uint32_t group = context.group();
  return {std::vector<double>(group, -kInf),
          std::vector<Line>(group),
          {},
          std::vector<double>(size_t{group} * context.value_dim)};
}

Remainder EmptyCoefficients(const RemainderContext& context) {
  const uint32_t group = context.group();
  return {std::vector<double>(group, -kInf),
          {},
          std::vector<float>(group * context.k()),
          std::vector<double>(size_t{group} * context.value_dim)};
}

ScoreMean RemoveRetrieved(const RemainderContext& context, uint32_t g) {
  ScoreMean mean;
  const std::span<const float> q = context.query(g);
  const std::span<const double> mean_key = context.in.moment->mean_key();
  mean.of_mid = double{context.in.layer.scale} *
                SumOf(context.key_dim, [&](size_t j) { return double{q[j]} * mean_key[j]; });
  const std::span<const float> s = context.scores_of(g);
  const float centre = static_cast<float>(mean.of_mid);
  mean.retrieved_sum = Kernels().centred_total(s.data(), s.size(), centre) +
                       static_cast<double>(s.size()) * (double{centre} - mean.of_mid);
  mean.of_remainder = mean.of_mid - mean.retrieved_sum / context.remaining();
  return mean;
}

double MeanRemainingScore(const RemainderContext& context, uint32_t g) {
  return context.in.moment != nullptr ? RemoveRetrieved(context, g).of_remainder : -kInf;
}

double TiltCut(const Cut& cut, double mean, double sigma, double remaining) {
  if (remaining <= 1) return mean;
  if (cut.kind != CutKind::kNone) return cut.score;
  return std::min(double{cut.score}, mean + sigma * std::sqrt(2 * std::log(remaining)));
}

double ClampToBracket(double log_z, const Cut& cut, double mean, double remaining) {
  const double log_count = std::log(remaining);
  if (cut.kind != CutKind::kNone) log_z = std::min(log_z, log_count + cut.score);
  return std::max(log_z, log_count + mean);
}

}  // namespace prefixd
