// Runs the last kernel of a step: the splits of a head become one exact state, the remainder is
// estimated from the summary less the retrieved rows, and the two are normalised once
// (docs/mathematics.md, steps 3, 4).
#include "gpu/step/remainder.cuh"

namespace prefixd::gpu::internal {
namespace {

__device__ Sums SumSplits(const StepParams& p, const StepLayout& layout, const GroupRows& rows,
                          uint32_t group, uint32_t head, const DeviceSummary& summary) {
  const uint32_t dh = layout.key_dim, dv = layout.value_dim, c = threadIdx.x;
  const float* partials = static_cast<const float*>(p.args.workspace) + layout.partial_at(group, 0);
  const bool estimated = summary.estimator != EstimatorKind::kNone;
  const bool phi = summary.estimator == EstimatorKind::kPhi;
  const bool centred = HasMeanKey(summary);
  const RowSplit one = SplitRows(rows.count, p.n_splits, 0, kTile);
  const uint32_t used = one.end > 0 ? (rows.count + one.end - 1) / one.end : 0;
  Sums sums;
#pragma unroll 8
  for (uint32_t split = 0; split < used; ++split) {
    sums.m = fmaxf(sums.m, partials[split * layout.partial_floats() + layout.m_at() + head]);
  }
#pragma unroll 4
  for (uint32_t split = 0; split < used; ++split) {
    const float* part = partials + split * layout.partial_floats();
    const float weight = expf(part[layout.m_at() + head] - sums.m);
    sums.z = fmaf(part[layout.z_at() + head], weight, sums.z);
    if (c < dv) sums.n = fmaf(part[layout.n_at() + size_t{head} * dv + c], weight, sums.n);
  }
  if (!estimated) return sums;
#pragma unroll 4
  for (uint32_t split = 0; split < used; ++split) {
    const float* part = partials + split * layout.partial_floats();
    sums.b0 += part[layout.b0_at() + head];
    sums.b2 += part[layout.b2_at() + head];
    if (c < dv) sums.b1 += part[layout.b1_at() + size_t{head} * dv + c];
  }
  if (centred) {
#pragma unroll 4
    for (uint32_t split = 0; split < used; ++split) {
      const float* part = partials + split * layout.partial_floats();
      if (c < dv) sums.value1 += part[layout.value1_at() + c];
      if (c < dh) sums.key1 += part[layout.key1_at() + c];
      if (c < dh) sums.key2 += part[layout.key2_at() + c];
    }
  }
  if (phi && c < layout.d_phi) {
#pragma unroll 4
    for (uint32_t split = 0; split < used; ++split) {
      sums.feature += partials[split * layout.partial_floats() + layout.feature_at() + c];
    }
  }
  return sums;
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
  const Sums sums = SumSplits(p, layout, rows, group, head, summary);

  Remainder remainder;
  const double count = double(summary.mid_count) - (rows.count - rows.anchors);  // |R|
  if (summary.estimator != EstimatorKind::kNone && count > 0) {
    const Cut cut = p.args.cuts ? p.args.cuts[blockIdx.x] : Cut{float(Infinity()), CutKind::kNone};
    const double scaled_q =
        c < dh ? double{p.shape.layer.scale} * p.args.queries[size_t{blockIdx.x} * dh + c] : 0.0;
    const HeadView view{p, layout, summary, state, group, head, scaled_q, count, cut};
    if (summary.estimator == EstimatorKind::kMoment) {
      remainder = MomentRemainder(view, sums);
    } else if (summary.estimator == EstimatorKind::kPhi) {
      remainder = PhiEstimate(view, sums);
    } else {
      remainder = ClusterRemainder(view, sums);
    }
  }

  // Exact part and remainder share one shift and are normalised once.
  const double log_r = remainder.mass.log_mass;
  const double shift = fmax(double{sums.m}, log_r);
  if (shift == -Infinity()) {  // the store holds no rows
    if (c < dv) y[c] = 0;
    if (c == 0) {
      p.args.lse[blockIdx.x] = -INFINITY;
      p.args.rho_z[blockIdx.x] = 0;
    }
    return;
  }
  const double exact = exp(sums.m - shift) * sums.z, estimated = exp(log_r - shift);
  const double whole = exact + estimated;
  // The state covers the exact rows with the merged estimate, or the exact rows alone.
  const double merged = summary.merge_estimate ? estimated : 0.0;
  const double z = exact + merged;
  float out = 0;
  if (c < dv && z > 0) {
    out = static_cast<float>((exp(sums.m - shift) * sums.n + merged * remainder.value) / z);
  }
  const float lse = z > 0 ? static_cast<float>(shift + log(z)) : -INFINITY;
  if (c < dv) y[c] = out;
  if (c == 0) {
    p.args.lse[blockIdx.x] = lse;
    p.args.rho_z[blockIdx.x] = static_cast<float>(estimated / whole);
  }
  if (!Finite(out) || (z > 0 && !Finite(lse))) {
    Fault(p.args.errors, group, GroupFault::kOverflow, head);
  }
}

}  // namespace

int LaunchMergeKernel(const StepParams& params, Stream stream) {
  const uint32_t blocks = params.shape.n_groups * params.shape.group;
  return Launch(MergeKernel, dim3(blocks), 0, 0, params, stream);
}

}  // namespace prefixd::gpu::internal
