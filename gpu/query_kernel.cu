// Kernel 1 of a step: what each head's estimator says before any row is read (StepLayout's
// HeadState): for phi, log phi_q, its weights p[f] and the constant sum_f p[f] T[f,:]; for the
// moments, the mean score of M and scale * C^T q.
#include "gpu/group_view.cuh"
#include "gpu/phi_tile.cuh"

namespace prefixd::gpu::internal {
namespace {

// out[d] = scale * sum_i weight[i] matrix[i][d]: weight [n] in shared memory, matrix [n][columns].
__device__ void WeightedRows(const float* weight, uint32_t n, const float* matrix, uint32_t columns,
                             float scale, float* out) {
  for (uint32_t d = threadIdx.x; d < columns; d += kThreads) {
    float sum = 0;
    for (uint32_t i = 0; i < n; ++i) sum = fmaf(weight[i], matrix[size_t{i} * columns + d], sum);
    out[d] = scale * sum;
  }
}

// Everything is relative to shift = max_f (log phi_q[f] + m[f] + log u[f]), so p[f] u[f] <= 1.
__device__ void PhiState(const StepParams& p, const StepLayout& layout, const DeviceSummary& s,
                         uint32_t head, const float* q, float* shared, float* state) {
  const QueryShared at(p.shape);
  const uint32_t d_phi = p.shape.d_phi, f = threadIdx.x;  // d_phi <= kThreads: one thread each
  float* feature = shared + at.feature;
  LogPhiTile<1>(s.phi_q[head], q, shared + at.embed, shared + at.hidden, feature, Pad4(d_phi));

  const float u = f < d_phi ? s.phi_u[f] : 0.0f;
  const bool holds = u > 0;  // false for all f where M is empty (m = -inf, u = 0)
  const float log_qm = holds ? feature[f] + s.phi_m[f] : 0.0f;
  const float log_mass = holds ? log_qm + logf(u) : -INFINITY;
  const float max = BlockMax(log_mass);
  const float shift = max == -INFINITY ? 0.0f : max;
  const float weight = holds ? expf(log_qm - shift) : 0.0f;
  const float p0 = BlockSum(weight * u);
  if (f < d_phi) {
    feature[f] = weight;
    state[layout.p_at() + f] = weight;
  }
  if (threadIdx.x == 0) {
    state[0] = shift;
    state[1] = p0;
  }
  __syncthreads();
  WeightedRows(feature, d_phi, s.phi_t, p.shape.row.value_dim, 1.0f, state + layout.constant_at());
}

__device__ void MomentState(const StepParams& p, const StepLayout& layout, const DeviceSummary& s,
                            const float* q, float* state) {
  const uint32_t dh = p.shape.row.key_dim, dv = p.shape.row.value_dim;
  const float scale = p.shape.layer.scale;
  const float term = threadIdx.x < dh ? q[threadIdx.x] * s.mean_key[threadIdx.x] : 0.0f;
  const float mean_score = scale * BlockSum(term);
  if (threadIdx.x == 0) state[0] = mean_score;
  if (s.cross) WeightedRows(q, dh, s.cross, dv, scale, state + layout.constant_at());
}

// Grid: one block per (group, head).
__global__ void __launch_bounds__(kThreads) QueryKernel(const __grid_constant__ StepParams p) {
  float* shared = DynamicShared();
  const uint32_t group = blockIdx.x / p.shape.group, head = blockIdx.x % p.shape.group;
  const uint32_t dh = p.shape.row.key_dim;
  const StepLayout layout(p.shape, p.n_splits);
  float* q = shared + QueryShared(p.shape).q;

  for (uint32_t j = threadIdx.x; j < dh; j += kThreads) {
    q[j] = p.args.queries[size_t{blockIdx.x} * dh + j];
    if (!Finite(q[j])) Fault(p.args.errors, group, GroupFault::kQuery, head);
  }
  __syncthreads();

  const DeviceSummary& summary = p.args.summaries[group];
  if (!SummaryFits(p.shape, summary, head)) {  // the same for all threads
    if (threadIdx.x == 0) Fault(p.args.errors, group, GroupFault::kSummary, head);
    return;
  }
  float* state = static_cast<float*>(p.args.workspace) + layout.head_at(group, head);
  if (summary.estimator == EstimatorKind::kPhi) {
    PhiState(p, layout, summary, head, q, shared, state);
  } else if (summary.estimator == EstimatorKind::kMoment) {
    MomentState(p, layout, summary, q, state);
  }
}

}  // namespace

int LaunchQueryKernel(const StepParams& params, Stream stream) {
  const uint32_t blocks = params.shape.n_groups * params.shape.group;
  const size_t shared_bytes = QueryShared(params.shape).total * sizeof(float);
  return Launch(QueryKernel, dim3(blocks), shared_bytes, 0, params, stream);
}

}  // namespace prefixd::gpu::internal
