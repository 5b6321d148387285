// The kernels of gpu/ as plain C++. Their Launch functions take the place of prefixd_gpu's in the
// program this is linked into.
#include "tests/gpu/emulated/emulated_cuda.h"
// clang-format off: the above comes first
#include "gpu/exact/exact_kernel.cu"
#include "gpu/step/cluster_kernel.cu"
#include "gpu/step/merge_kernel.cu"
#include "gpu/step/query_kernel.cu"
#include "gpu/step/split_kernel.cu"
#include "gpu/topk/topk_code_kernel.cu"
#include "gpu/topk/topk_score_kernel.cu"
#include "gpu/topk/topk_select_kernel.cu"
// clang-format on

namespace prefixd::gpu {

bool EmulatedLogPhi(const DeviceKeyMap& map, const float* x, size_t n, float* out) {
  using internal::ActivationTile;
  using internal::kTile;
  using internal::Pad4;
  const size_t ldx = Pad4(map.in_dim), ldf = Pad4(map.d_phi);
  const size_t wide =
      std::max({ActivationTile(map.in_dim), ActivationTile(map.d_emb), kTile * ldf});
  const auto body = [&] {
    const size_t first = size_t{blockIdx.x} * kTile, rows = std::min<size_t>(kTile, n - first);
    float* tile = internal::DynamicShared();
    const internal::PhiScratch scratch{tile + kTile * ldx, tile + kTile * ldx + wide,
                                       tile + kTile * ldx + wide + ActivationTile(map.d_emb)};
    float* feature = scratch.first;
    for (size_t i = threadIdx.x; i < kTile * map.in_dim; i += internal::kThreads) {
      const size_t r = i / map.in_dim, j = i % map.in_dim;
      tile[r * ldx + j] = r < rows ? x[(first + r) * map.in_dim + j] : 0.0f;
    }
    __syncthreads();
    internal::LogPhiTile(map, tile, ldx, scratch, feature, ldf);
    for (size_t i = threadIdx.x; i < rows * map.d_phi; i += internal::kThreads) {
      out[first * map.d_phi + i] = feature[i / map.d_phi * ldf + i % map.d_phi];
    }
  };
  const size_t floats = kTile * ldx + wide + ActivationTile(map.d_emb) + kTile * Pad4(map.d_emb);
  const dim3 grid(static_cast<uint32_t>((n + kTile - 1) / kTile));
  return emulated::RunGrid(grid, internal::kThreads, floats * sizeof(float), emulated::Seed(),
                           body);
}

}  // namespace prefixd::gpu
