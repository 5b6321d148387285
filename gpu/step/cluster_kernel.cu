// Runs kernel 3 of a step, where clusters are in use: what the retrieved rows leave of each cluster
// (StepLayout's Cluster). The kernel reads rows from where the split kernel kept them; each sum has
// one owner and one order, so that a step gives the same bits every time.
#include "gpu/step/estimator_math.h"
#include "gpu/step/group_view.cuh"

namespace prefixd::gpu::internal {
namespace {

// Calls visit(i) for each retrieved row i of cluster c, in order, by all threads of the block.
template <typename Visit>
__device__ void ForMembers(const uint16_t* clusters, uint32_t n, uint32_t c, Visit visit) {
  __shared__ uint16_t batch[kThreads];
  for (uint32_t first = 0; first < n; first += kThreads) {
    __syncthreads();  // the previous batch has been read
    if (first + threadIdx.x < n) batch[threadIdx.x] = clusters[first + threadIdx.x];
    __syncthreads();
    for (uint32_t i = 0; i < min(kThreads, n - first); ++i) {
      if (batch[i] == c) visit(first + i);
    }
  }
}

// Returns the largest mass that the scan saw in any cluster, for one head.
__device__ float ScanShift(const DeviceSummary& s, uint32_t head) {
  float max = -INFINITY;
  for (uint32_t c = threadIdx.x; c < s.n_clusters; c += kThreads) {
    max = fmaxf(max, s.scan_log_mass[size_t{head} * s.n_clusters + c]);
  }
  return BlockMax(max);
}

// Grid: x = group, y = cluster.
__global__ void __launch_bounds__(kThreads) ClusterKernel(const __grid_constant__ StepParams p) {
  const uint32_t group = blockIdx.x, c = blockIdx.y, t = threadIdx.x;
  const DeviceSummary& s = p.args.summaries[group];
  const GroupRows rows = RowsOf(p, group);
  // Every return is the same for all threads of the block; earlier kernels reported the faults.
  if (!UsesClusters(s.estimator) || c >= s.n_clusters || !rows.fits) return;
  if (p.args.errors[group] >> kFaultShift == static_cast<uint32_t>(GroupFault::kSummary)) return;

  const uint32_t dh = p.shape.row.key_dim, dv = p.shape.row.value_dim, G = p.shape.group;
  const uint32_t k = rows.count - rows.anchors;
  const StepLayout layout(p.shape, p.n_splits);
  float* workspace = static_cast<float*>(p.args.workspace);
  float* out = workspace + layout.cluster_at(group, c);
  const bool keys = s.estimator != EstimatorKind::kScan;
  const double mean = keys && t < dh ? s.cluster_keys[size_t{c} * dh + t] : 0.0;
  double shift = 0, square = 0, value = 0, mass = 0;
  uint32_t members = 0;

  // Thread g < G also sums the scan's masses of head g; all threads first compute its shift.
  float scan_shift = 0;
  for (uint32_t g = 0; g < G && !keys; ++g) {
    const float of_head = ScanShift(s, g);
    if (t == g) scan_shift = of_head;
  }
  const Cut cut =
      p.args.cuts && t < G ? p.args.cuts[size_t{group} * G + t] : Cut{INFINITY, CutKind::kNone};
  ForMembers(p.args.row_clusters + rows.first + rows.anchors, k, c, [&](uint32_t i) {
    const float* row = workspace + layout.kept_at(group, rows.anchors + i);
    ++members;
    if (keys && t < dh) {
      const double d = row[t] - mean;
      shift += d;
      square += d * d;
    }
    if (t < dv) value += row[dh + t];
    if (!keys && t < G) {
      const float score = s.scan_retrieved_scores[size_t{t} * k + i];
      mass += exp(double{fminf(score, cut.score)} - scan_shift);
    }
  });

  const double left = double(s.cluster_counts[c]) - members;
  const double removed = left >= 1 ? square + shift * shift / left : square;
  const double all_removed = keys ? BlockSum(removed) : 0.0;
  if (t == 0) {
    out[0] = static_cast<float>(left);
    if (keys) {
      const double spread = s.cluster_spreads[c];
      const double rest = spread - all_removed;
      out[layout.spread_at()] = rest < kNegligibleSpread * spread ? 0.0f : static_cast<float>(rest);
    }
  }
  if (keys && t < dh) out[layout.shift_at() + t] = static_cast<float>(shift);
  if (t < dv) out[layout.cluster_value_at() + t] = static_cast<float>(value);
  if (!keys && t < G) out[layout.mass_at() + t] = static_cast<float>(mass);
}

}  // namespace

int LaunchClusterKernel(const StepParams& params, Stream stream) {
  if (params.shape.max_clusters == 0) return 0;
  const dim3 grid(params.shape.n_groups, params.shape.max_clusters);
  return Launch(ClusterKernel, grid, 0, 0, params, stream);
}

}  // namespace prefixd::gpu::internal
