// Computes the remainder of one query head from its summary less the sums over retrieved rows (spec
// §3). Internal to gpu/; a part of the merge kernel. All threads of a block call every function.
#pragma once

#include "attention/estimators/phi_cache.h"
#include "gpu/step/estimator_math.h"
#include "gpu/step/group_view.cuh"

namespace prefixd::gpu::internal {

// Sums are what one block sums over the splits of its head; column sums are those of column
// threadIdx.x.
struct Sums {
  float m = -INFINITY;              // largest score of E
  float z = 0, b0 = 0, b2 = 0;      // sum exp(s - m), sum b, sum b^2
  float n = 0, b1 = 0, value1 = 0;  // in the value column
  double key1 = 0, key2 = 0;        // in the key column
  float feature = 0;                // the thread's feature
};

// A HeadView is the data of the head and its remainder beside the sums.
struct HeadView {
  const StepParams& p;
  const StepLayout& layout;
  const DeviceSummary& summary;
  const float* state;  // HeadState
  uint32_t group, head;
  double scaled_q;  // scale * q[threadIdx.x], 0 beyond the key
  double count;     // |R| > 0
  Cut cut;
};

// A Remainder is its mass (the same for all threads) and its mean value in column threadIdx.x.
struct Remainder {
  RemainderMass mass;
  float value = 0;
};

// Computes on one thread a value that all need: long float64 chains are worth doing once.
template <typename Compute>
__device__ RemainderMass Once(Compute compute) {
  __shared__ double log_mass, lever;
  __syncthreads();  // the value has been read since its previous use
  if (threadIdx.x == 0) {
    const RemainderMass mass = compute();
    log_mass = mass.log_mass;
    lever = mass.lever;
  }
  __syncthreads();
  return {log_mass, lever};
}

// MeanScore is the mean score of the remainder, from that of M: mu_R = mu_M - scale sum_j q_j
// key1_j / |R|. REQUIRES a mean key.
struct MeanScore {
  double shift;  // scale sum_j q_j key1_j
  double of_remainder;
};
__device__ inline MeanScore RemoveRetrieved(const HeadView& h, const Sums& sums) {
  const uint32_t c = threadIdx.x;
  double of[2] = {h.scaled_q * sums.key1,
                  c < h.layout.key_dim ? h.scaled_q * h.summary.mean_key[c] : 0.0};
  BlockSums(of);
  return {of[0], of[1] - of[0] / h.count};
}

// The same, and the variance of the remaining scores, in one round of sums.
struct RemainingScores {
  MeanScore mean;
  double variance;
};
__device__ inline RemainingScores RemoveScores(const HeadView& h, const Sums& sums) {
  const DeviceSummary& s = h.summary;
  const uint32_t c = threadIdx.x;
  double of[3] = {h.scaled_q * sums.key1, 0, 0};
  if (c < h.layout.key_dim) {
    of[1] = h.scaled_q * s.mean_key[c];
    // Chan's formula runs backwards, per key channel.
    const double m2 = s.key_m2[c] - sums.key2 - sums.key1 * sums.key1 / h.count;
    if (h.count > 1 && m2 > kNegligibleSpread * s.key_m2[c]) of[2] = h.scaled_q * h.scaled_q * m2;
  }
  BlockSums(of);
  RemainingScores out{{of[0], of[1] - of[0] / h.count}, of[2] / h.count};
  if (s.covariance) {
    // The variance is known over all of M; the retrieved rows leave it by their scores alone.
    const double whole = h.state[1], shift = of[0];
    const double left = whole - shift * shift / h.count - sums.b2;
    out.variance = h.count > 1 && left > kNegligibleSpread * whole ? left / h.count : 0.0;
  }
  return out;
}

__device__ inline Remainder MomentRemainder(const HeadView& h, const Sums& sums) {
  const DeviceSummary& s = h.summary;
  const uint32_t c = threadIdx.x;
  const auto [mean, variance] = RemoveScores(h, sums);
  Remainder out;
  out.mass = Once([&, of = mean.of_remainder, spread = variance] {
    return TiltedMoment(h.count, of, spread, h.cut);
  });
  if (c < h.layout.value_dim) {
    double value = s.mean_value[c] - sums.value1 / h.count;
    if ((s.cross || s.cross_rank > 0) && out.mass.lever != 0) {
      // sum_R (s - mu_R)(v - vbar_R) is that of M, less the retrieved, less the two means'
      // movement.
      const double cross = double{h.state[h.layout.constant_at() + c]} - sums.b1 -
                           mean.shift * sums.value1 / h.count;
      value += out.mass.lever * cross / h.count;
    }
    out.value = static_cast<float>(value);
  }
  return out;
}

// Returns Z_R / Z_M: clamped as a whole, or on each feature [40].
__device__ inline double RemainingShare(const HeadView& h, const Sums& sums) {
  const double p0 = h.state[1];
  if (h.summary.phi_form == PhiForm::kSigned) return (p0 - sums.b0) / p0;
  const uint32_t f = threadIdx.x;
  double rest = 0;
  if (f < h.layout.d_phi && h.summary.phi_u[f] > 0) {
    const double u = double{h.summary.phi_u[f]} - sums.feature;
    rest = h.state[h.layout.p_at() + f] * fmax(u, kFeatureEpsilon);
  }
  return BlockSum(rest) / p0;
}

__device__ inline Remainder PhiEstimate(const HeadView& h, const Sums& sums) {
  const uint32_t c = threadIdx.x;
  double mean = -Infinity();
  if (h.summary.mean_key) mean = RemoveRetrieved(h, sums).of_remainder;  // the same for all
  const double p0 = h.state[1], share = RemainingShare(h, sums);
  Remainder out;
  out.mass = Once([&] { return PhiRemainder(h.count, h.state[0] + log(p0), share, mean, h.cut); });
  // Where the bracket moved the mass, its values move along, so that their mean stays.
  if (c < h.layout.value_dim && out.mass.log_mass > -Infinity()) {
    out.value = static_cast<float>((h.state[h.layout.constant_at() + c] - sums.b1) / (share * p0));
  }
  return out;
}

// ClusterRest holds, in shared memory, what remains of one head's clusters.
struct ClusterRest {
  float left[kMaxClusters];
  double mean[kMaxClusters];      // score; scan: unused
  double variance[kMaxClusters];  // variance of the scores, from the sum over the remaining tokens
  double log_mass[kMaxClusters];
};

// Computes left, mean and variance of each cluster; one warp per cluster.
__device__ inline void SumClusters(const HeadView& h, ClusterRest& rest) {
  const DeviceSummary& s = h.summary;
  const uint32_t lane = threadIdx.x % kWarp, dh = h.layout.key_dim;
  const float* workspace = static_cast<const float*>(h.p.args.workspace);
  const float* q = h.p.args.queries + (size_t{h.group} * h.layout.group + h.head) * dh;
  const double scale = h.p.shape.layer.scale;
  const bool keys = s.estimator != EstimatorKind::kScan;
  for (uint32_t c = threadIdx.x / kWarp; c < s.n_clusters; c += kWarps) {
    const float* cluster = workspace + h.layout.cluster_at(h.group, c);
    double shift = 0, variance = 0;
    for (uint32_t j = lane; j < dh && keys; j += kWarp) {
      // The spread is taken to be the same in all directions.
      const double spread = double{cluster[h.layout.spread_at()]} / dh;
      const double scaled = scale * q[j];
      shift += scaled * cluster[h.layout.shift_at() + j];
      variance += scaled * scaled * spread;
    }
    shift = WarpSum(shift);
    variance = WarpSum(variance);
    if (lane != 0) continue;
    const float left = cluster[0];
    rest.left[c] = left;
    rest.mean[c] = keys && left >= 1 ? h.state[h.layout.mean_at() + c] - shift / left : 0.0;
    rest.variance[c] = left > 1 ? variance / left : 0.0;
  }
  __syncthreads();
}

// Computes log_mass of each cluster: by its own tilted mean and spread, or by the scan less the
// retrieved rows.
__device__ inline void ClusterMasses(const HeadView& h, ClusterRest& rest) {
  const DeviceSummary& s = h.summary;
  const float* workspace = static_cast<const float*>(h.p.args.workspace);
  const float* scanned = nullptr;
  double scan_shift = 0;
  if (s.estimator == EstimatorKind::kScan) {
    scanned = s.scan_log_mass + size_t{h.head} * s.n_clusters;
    float max = -INFINITY;
    for (uint32_t c = threadIdx.x; c < s.n_clusters; c += kThreads) max = fmaxf(max, scanned[c]);
    scan_shift = BlockMax(max);
  }
  for (uint32_t c = threadIdx.x; c < s.n_clusters; c += kThreads) {
    double log_mass = -Infinity();
    const double left = rest.left[c];
    if (left >= 1 && !scanned) {
      const double cut = TiltCutOf(h.cut, rest.mean[c], sqrt(rest.variance[c]), left);
      const double log_mean = TiltOf(rest.mean[c], rest.variance[c], cut).log_mean;
      log_mass = log(left) + fmax(log_mean, rest.mean[c]);  // Jensen's bound
    } else if (left >= 1 && scan_shift > -Infinity()) {
      const double whole = exp(scanned[c] - scan_shift);
      const double mass =
          whole - workspace[h.layout.cluster_at(h.group, c) + h.layout.mass_at() + h.head];
      // When almost all of a cluster was retrieved, the rest is rounding.
      if (mass > 1e-6 * whole) log_mass = scan_shift + log(mass);
    }
    rest.log_mass[c] = log_mass;
  }
  __syncthreads();
}

// Returns log sum exp of all clusters' masses to every thread.
__device__ inline double TotalMass(const ClusterRest& rest, uint32_t n) {
  double max = -Infinity();
  for (uint32_t c = 0; c < n; ++c) max = fmax(max, rest.log_mass[c]);
  if (max == -Infinity()) return max;
  double sum = 0;
  for (uint32_t c = threadIdx.x; c < n; c += kThreads) sum += exp(rest.log_mass[c] - max);
  return max + log(BlockSum(sum));
}

__device__ inline Remainder ClusterRemainder(const HeadView& h, const Sums& sums) {
  __shared__ ClusterRest rest;
  const DeviceSummary& s = h.summary;
  const float* workspace = static_cast<const float*>(h.p.args.workspace);
  SumClusters(h, rest);
  double mean = -Infinity();
  if (s.estimator != EstimatorKind::kScan) {
    double sum = 0;
    for (uint32_t c = threadIdx.x; c < s.n_clusters; c += kThreads) {
      if (rest.left[c] >= 1) sum += rest.left[c] * rest.mean[c];
    }
    mean = BlockSum(sum) / h.count;
  } else if (s.mean_key) {
    mean = RemoveRetrieved(h, sums).of_remainder;
  }
  ClusterMasses(h, rest);
  const double total = TotalMass(rest, s.n_clusters);

  Remainder out;
  out.mass.log_mass = ClampToBracket(total, log(h.count), mean, h.cut);
  if (out.mass.log_mass == -Infinity()) return out;
  // Each cluster's mean value counts by its share of the mass; without any estimate of the masses
  // every token weighs the same. From here on variance[c] is the weight of a token.
  __syncthreads();
  for (uint32_t c = threadIdx.x; c < s.n_clusters; c += kThreads) {
    const bool unknown = total == -Infinity();
    const double share = unknown ? 1 / h.count : exp(rest.log_mass[c] - total) / rest.left[c];
    rest.variance[c] = rest.left[c] >= 1 ? share : 0.0;
  }
  __syncthreads();
  if (threadIdx.x >= h.layout.value_dim) return out;
  double value = 0;
  for (uint32_t c = 0; c < s.n_clusters; ++c) {
    if (rest.variance[c] == 0) continue;
    const float* cluster = workspace + h.layout.cluster_at(h.group, c);
    value +=
        rest.variance[c] * (double(s.cluster_counts[c]) *
                                s.cluster_values[size_t{c} * h.layout.value_dim + threadIdx.x] -
                            cluster[h.layout.cluster_value_at() + threadIdx.x]);
  }
  out.value = static_cast<float>(value);
  return out;
}

}  // namespace prefixd::gpu::internal
