// Computes log phi of one query in shared memory (attention/estimators/feature_map.h) by float32
// multiply-adds: a matrix times one vector is bound by reading the matrix, and a query has no tile
// to fill. Internal to gpu/.
#pragma once

#include "gpu/device/tile.cuh"

namespace prefixd::gpu::internal {

__device__ inline float Gelu(float x) { return 0.5f * x * (1.0f + erff(x * 0.70710678118654752f)); }

// Calls finish(o, b[o] + sum_i w[i][o] x[i]) for each output o.
// x: [n_in] in shared memory; w: [n_in][n_out]; b: [n_out].
// A thread takes one output: neighbouring threads read neighbouring weights.
template <typename Finish>
__device__ inline void LinearVector(const float* x, uint32_t n_in, const float* w, const float* b,
                                    uint32_t n_out, Finish finish) {
  for (uint32_t o = threadIdx.x; o < n_out; o += kThreads) {
    float sum = b[o];
#pragma unroll 8
    for (uint32_t i = 0; i < n_in; ++i) sum = fmaf(w[size_t{i} * n_out + o], x[i], sum);
    finish(o, sum);
  }
}

// Computes out[f] = log phi(x)[f]. All arrays are in shared memory: x [in_dim], out [d_phi], embed
// and hidden [d_emb] scratch. Block-wide; x must be visible to all threads. On return so is `out`.
__device__ inline void LogPhiOfQuery(const DeviceQueryMap& map, const float* x, float* embed,
                                     float* hidden, float* out) {
  const float alpha = map.alpha;
  LinearVector(x, map.in_dim, map.w_in, map.b_in, map.d_emb,
               [=](uint32_t o, float g0) { embed[o] = g0; });
  __syncthreads();
  LinearVector(embed, map.d_emb, map.w1, map.b1, map.d_emb,
               [=](uint32_t o, float h) { hidden[o] = Gelu(h); });
  __syncthreads();
  // The layer computes g1 = g0 + alpha h in place: each element is read and written by one thread
  // only.
  LinearVector(hidden, map.d_emb, map.w2, map.b2, map.d_emb,
               [=](uint32_t o, float h) { embed[o] = fmaf(alpha, h, embed[o]); });
  __syncthreads();
  LinearVector(embed, map.d_emb, map.w_out, map.b_out, map.d_phi,
               [=](uint32_t f, float g2) { out[f] = g2; });
  __syncthreads();
}

}  // namespace prefixd::gpu::internal
