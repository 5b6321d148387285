// Runs kernel 1 of a step: each head's estimator before any row is read (StepLayout's HeadState):
// for phi, log phi_q, its weights p[f] and the constant sum_f p[f] T[f,:]; for the moments, the
// mean score of M, its variance where the covariance is kept, and scale * q^T C; the mean score of
// each cluster.
#include "gpu/step/group_view.cuh"
#include "gpu/step/phi_query.cuh"

namespace prefixd::gpu::internal {
namespace {

// The block's shared memory (QueryShared).
struct Scratch {
  float *q, *along, *feature, *embed, *hidden, *vector;
};

// Computes out[d] = scale * sum_i weight[i] matrix[i][d]: weight [n] in shared memory, matrix
// [n][columns].
__device__ void WeightedRows(const float* weight, uint32_t n, const float* matrix, uint32_t columns,
                             float scale, float* vector, float* out) {
  MatrixVector(weight, n, matrix, columns, vector,
               [=](uint32_t d, float sum) { out[d] = scale * sum; });
}

// Exponentials are relative to shift = max_f (log phi_q[f] + m[f] + log u[f]), so p[f] u[f] <= 1.
__device__ void PhiState(const StepParams& p, const StepLayout& layout, const DeviceSummary& s,
                         uint32_t head, const Scratch& scratch, float* state) {
  const uint32_t d_phi = p.shape.d_phi, f = threadIdx.x;  // d_phi <= kThreads: one thread each
  float* feature = scratch.feature;
  LogPhiOfQuery(QueryMap(s, head), scratch.q, scratch.embed, scratch.hidden, scratch.vector,
                feature);

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
  WeightedRows(feature, d_phi, s.phi_t, p.shape.row.value_dim, 1.0f, scratch.vector,
               state + layout.constant_at());
}

// Computes scale q^T C over all of M, from C or from its factor.
__device__ void CrossState(const StepParams& p, const DeviceSummary& s, const Scratch& scratch,
                           float* out) {
  const uint32_t dh = p.shape.row.key_dim, dv = p.shape.row.value_dim;
  const float scale = p.shape.layer.scale;
  if (s.cross) {
    WeightedRows(scratch.q, dh, s.cross, dv, scale, scratch.vector, out);
  } else if (s.cross_rank > 0) {
    WeightedRows(scratch.q, dh, s.key_factor, s.cross_rank, scale, scratch.vector, scratch.along);
    __syncthreads();
    WeightedRows(scratch.along, s.cross_rank, s.value_factor, dv, 1.0f, scratch.vector, out);
  }
}

// Returns scale^2 q^T Cov q to every thread. The sum is in float64: where keys have a large common
// direction that the query does not see, its terms cancel.
__device__ double ScoreSpread(const StepParams& p, const DeviceSummary& s, const float* q) {
  const uint32_t dh = p.shape.row.key_dim;
  double sum = 0;
#pragma unroll 8
  for (uint32_t i = threadIdx.x; i < dh * dh; i += kThreads) {
    sum += double{q[i / dh]} * s.covariance[i] * q[i % dh];
  }
  return double{p.shape.layer.scale} * p.shape.layer.scale * BlockSum(sum);
}

__device__ void MomentState(const StepParams& p, const StepLayout& layout, const DeviceSummary& s,
                            const Scratch& scratch, float* state) {
  const uint32_t c = threadIdx.x;
  const float* q = scratch.q;
  const double term = c < layout.key_dim ? double{q[c]} * s.mean_key[c] : 0.0;
  const double mean_score = double{p.shape.layer.scale} * BlockSum(term);
  const double spread = s.covariance ? ScoreSpread(p, s, q) : 0.0;
  if (c == 0) {
    state[0] = static_cast<float>(mean_score);
    state[1] = static_cast<float>(spread);
  }
  CrossState(p, s, scratch, state + layout.constant_at());
}

// One warp computes one cluster.
__device__ void ClusterState(const StepParams& p, const StepLayout& layout, const DeviceSummary& s,
                             const float* q, float* state) {
  if (s.estimator == EstimatorKind::kScan) return;  // the scan knows the scores themselves
  const uint32_t lane = threadIdx.x % kWarp, dh = layout.key_dim;
  for (uint32_t c = threadIdx.x / kWarp; c < s.n_clusters; c += kWarps) {
    const float* key = s.cluster_keys + size_t{c} * dh;
    double sum = 0;
    for (uint32_t j = lane; j < dh; j += kWarp) sum += double{q[j]} * key[j];
    sum = p.shape.layer.scale * WarpSum(sum);
    if (lane == 0) state[layout.mean_at() + c] = static_cast<float>(sum);
  }
}

// Grid: one block per (group, head).
__global__ void __launch_bounds__(kThreads) QueryKernel(const __grid_constant__ StepParams p) {
  float* shared = DynamicShared();
  const uint32_t group = blockIdx.x / p.shape.group, head = blockIdx.x % p.shape.group;
  const uint32_t dh = p.shape.row.key_dim;
  const StepLayout layout(p.shape, p.n_splits);
  const QueryShared at(p.shape);
  const Scratch scratch{shared + at.q,     shared + at.along,  shared + at.feature,
                        shared + at.embed, shared + at.hidden, shared + at.vector};
  float* q = scratch.q;

  for (uint32_t j = threadIdx.x; j < dh; j += kThreads) {
    q[j] = p.args.queries[size_t{blockIdx.x} * dh + j];
    if (!Finite(q[j])) Fault(p.args.errors, group, GroupFault::kQuery, head);
  }
  __syncthreads();

  const DeviceSummary& summary = p.args.summaries[group];
  if (!SummaryFits(p, summary, head)) {  // the same for all threads
    if (threadIdx.x == 0) Fault(p.args.errors, group, GroupFault::kSummary, head);
    return;
  }
  float* state = static_cast<float*>(p.args.workspace) + layout.head_at(group, head);
  if (summary.estimator == EstimatorKind::kPhi) {
    PhiState(p, layout, summary, head, scratch, state);
  } else if (summary.estimator == EstimatorKind::kMoment) {
    MomentState(p, layout, summary, scratch, state);
  } else if (UsesClusters(summary.estimator)) {
    ClusterState(p, layout, summary, q, state);
  }
}

}  // namespace

int LaunchQueryKernel(const StepParams& params, Stream stream) {
  const uint32_t blocks = params.shape.n_groups * params.shape.group;
  const size_t shared_bytes = QueryShared(params.shape).total * sizeof(float);
  return Launch(QueryKernel, dim3(blocks), shared_bytes, 0, params, stream);
}

}  // namespace prefixd::gpu::internal
