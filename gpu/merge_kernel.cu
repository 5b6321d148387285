// Kernel 3 of a step: the splits of a head become one exact state, the remainder is estimated from
// the summary less the retrieved rows, and the two are normalised once (spec §2, steps 3 and 4).
#include "gpu/estimator_math.h"
#include "gpu/group_view.cuh"

namespace prefixd::gpu::internal {
namespace {

// What one block sums over the splits of its head; column sums are of column threadIdx.x.
struct Sums {
  float m = -INFINITY;              // largest score of E
  float z = 0, b0 = 0;              // sum exp(s - m), sum b
  float n = 0, b1 = 0, value1 = 0;  // of value column
  double key1 = 0, key2 = 0;        // of key column
};

__device__ Sums SumSplits(const StepParams& p, const StepLayout& layout, const GroupRows& rows,
                          uint32_t group, uint32_t head, const DeviceSummary& summary) {
  const uint32_t dh = layout.key_dim, dv = layout.value_dim, c = threadIdx.x;
  const float* partials = static_cast<const float*>(p.args.workspace) + layout.partial_at(group, 0);
  const bool estimated = summary.estimator != EstimatorKind::kNone;
  const bool centred = HasMeanKey(summary);
  const auto empty = [&](uint32_t split) {
    const RowSplit range = SplitRows(rows.count, p.n_splits, split, kTile);
    return range.begin == range.end;
  };
  Sums sums;
  for (uint32_t split = 0; split < p.n_splits && !empty(split); ++split) {
    sums.m = fmaxf(sums.m, partials[split * layout.partial_floats() + layout.m_at() + head]);
  }
  for (uint32_t split = 0; split < p.n_splits && !empty(split); ++split) {
    const float* part = partials + split * layout.partial_floats();
    const float weight = expf(part[layout.m_at() + head] - sums.m);
    sums.z = fmaf(part[layout.z_at() + head], weight, sums.z);
    if (c < dv) sums.n = fmaf(part[layout.n_at() + size_t{head} * dv + c], weight, sums.n);
    if (!estimated) continue;
    sums.b0 += part[layout.b0_at() + head];
    if (c < dv) sums.b1 += part[layout.b1_at() + size_t{head} * dv + c];
    if (c < dv && centred) sums.value1 += part[layout.value1_at() + c];
    if (c < dh && centred) {
      sums.key1 += part[layout.key1_at() + c];
      sums.key2 += part[layout.key2_at() + c];
    }
  }
  return sums;
}

// Relative rounding of a float32 sum of squares, with room for long sums.
constexpr double kVarianceNoise = 4e-6;

// The remainder of one head: its mass (the same for all threads) and its mean value in column
// threadIdx.x.
struct Remainder {
  RemainderMass mass;
  float value = 0;
};

// Mean score of the remainder, from that of M: mu_R = mu_M - scale sum_j q_j key1_j / |R|.
struct MeanScore {
  double shift;  // scale sum_j q_j key1_j
  double of_remainder;
};
__device__ MeanScore RemoveRetrieved(double scaled_q, double mean_key, double key1, double count) {
  MeanScore mean;
  mean.shift = BlockSum(scaled_q * key1);
  mean.of_remainder = BlockSum(scaled_q * mean_key) - mean.shift / count;
  return mean;
}

__device__ Remainder MomentRemainder(const DeviceSummary& s, const float* state_constant,
                                     const Sums& sums, double scaled_q, uint32_t dh, uint32_t dv,
                                     double count, Cut cut) {
  const uint32_t c = threadIdx.x;
  const MeanScore mean = RemoveRetrieved(scaled_q, c < dh ? s.mean_key[c] : 0.0, sums.key1, count);
  // Chan's formula backwards, per key channel; rounding must not leave a negative variance.
  const double m2 = c < dh ? s.key_m2[c] - sums.key2 - sums.key1 * sums.key1 / count : 0.0;
  const double weight = scaled_q * scaled_q;
  const double total = BlockSum(weight * (c < dh ? s.key_m2[c] : 0.0f));
  double variance = BlockSum(weight * fmax(m2, 0.0)) / count;
  // What is left of M's variance is float32 rounding: a few tokens remain, all of one score. Their
  // first-order term would be noise divided by noise.
  if (variance * count <= kVarianceNoise * total) variance = 0;

  Remainder out;
  out.mass = TiltedMoment(count, mean.of_remainder, variance, cut);
  if (c < dv) {
    double value = s.mean_value[c] - sums.value1 / count;
    if (s.cross) {
      // sum_R (s - mu_R)(v - vbar_R): of M, less the retrieved, less the two means' movement.
      const double cross = double{state_constant[c]} - sums.b1 - mean.shift * sums.value1 / count;
      value += out.mass.tau * cross / count;
    }
    out.value = static_cast<float>(value);
  }
  return out;
}

__device__ Remainder PhiEstimate(const DeviceSummary& s, const StepLayout& layout,
                                 const float* state, const Sums& sums, double scaled_q,
                                 double count, Cut cut) {
  const uint32_t c = threadIdx.x;
  double mean = -Infinity();
  if (s.mean_key) {  // the same for all threads
    const double mean_key = c < layout.key_dim ? s.mean_key[c] : 0.0;
    mean = RemoveRetrieved(scaled_q, mean_key, sums.key1, count).of_remainder;
  }
  const double p0 = state[1], left = p0 - sums.b0;
  Remainder out;
  out.mass = PhiRemainder(count, state[0] + log(p0), left / p0, mean, cut);
  // Where the bracket moved the mass, its values move along: their mean stays.
  if (c < layout.value_dim && out.mass.log_mass > -Infinity()) {
    out.value = static_cast<float>((state[layout.constant_at() + c] - sums.b1) / left);
  }
  return out;
}

// Grid: one block per (group, head).
__global__ void __launch_bounds__(kThreads) MergeKernel(const __grid_constant__ StepParams p) {
  const uint32_t group = blockIdx.x / p.shape.group, head = blockIdx.x % p.shape.group;
  const uint32_t dh = p.shape.row.key_dim, dv = p.shape.row.value_dim, c = threadIdx.x;
  float* y = p.args.y + size_t{blockIdx.x} * dv;
  // One thread reads the fault word for all: another head's block may be writing an overflow, and
  // threads that disagreed would part ways before a barrier.
  __shared__ bool refused;
  if (c == 0) {
    const uint32_t word = p.args.errors[group];
    refused = word != kGroupOk && word >> kFaultShift != uint32_t(GroupFault::kOverflow);
  }
  __syncthreads();
  if (refused) {
    if (c < dv) y[c] = NAN;
    if (c == 0) p.args.lse[blockIdx.x] = p.args.rho_z[blockIdx.x] = NAN;
    return;
  }

  const DeviceSummary& summary = p.args.summaries[group];
  const GroupRows rows = RowsOf(p, group);
  const StepLayout layout(p.shape, p.n_splits);
  const float* state = static_cast<const float*>(p.args.workspace) + layout.head_at(group, head);
  const bool phi = summary.estimator == EstimatorKind::kPhi;
  const bool moment = summary.estimator == EstimatorKind::kMoment;
  const Sums sums = SumSplits(p, layout, rows, group, head, summary);

  Remainder remainder;
  const double count = double(summary.mid_count) - (rows.count - rows.anchors);  // |R|
  if ((phi || moment) && count > 0) {
    const Cut cut = p.args.cuts ? p.args.cuts[blockIdx.x] : Cut{float(Infinity()), CutKind::kNone};
    const double scaled_q =
        c < dh ? double{p.shape.layer.scale} * p.args.queries[size_t{blockIdx.x} * dh + c] : 0.0;
    remainder = moment ? MomentRemainder(summary, state + layout.constant_at(), sums, scaled_q, dh,
                                         dv, count, cut)
                       : PhiEstimate(summary, layout, state, sums, scaled_q, count, cut);
  }

  // Exact part and remainder on one common shift, normalised once.
  const double log_r = remainder.mass.log_mass;
  const double shift = fmax(double{sums.m}, log_r);
  if (shift == -Infinity()) {  // nothing is stored
    if (c < dv) y[c] = 0;
    if (c == 0) {
      p.args.lse[blockIdx.x] = -INFINITY;
      p.args.rho_z[blockIdx.x] = 0;
    }
    return;
  }
  const double exact = exp(sums.m - shift), estimated = exp(log_r - shift);
  const double z = exact * sums.z + estimated;
  float out = 0;
  if (c < dv) {
    out = static_cast<float>((exact * sums.n + estimated * remainder.value) / z);
    y[c] = out;
  }
  if (c == 0) {
    p.args.lse[blockIdx.x] = static_cast<float>(shift + log(z));
    p.args.rho_z[blockIdx.x] = static_cast<float>(estimated / z);
  }
  const float lse = static_cast<float>(shift + log(z));
  if (!Finite(out) || !Finite(lse)) Fault(p.args.errors, group, GroupFault::kOverflow, head);
}

}  // namespace

int LaunchMergeKernel(const StepParams& params, Stream stream) {
  const uint32_t blocks = params.shape.n_groups * params.shape.group;
  return Launch(MergeKernel, dim3(blocks), 0, 0, params, stream);
}

}  // namespace prefixd::gpu::internal
