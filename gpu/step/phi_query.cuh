// Computes log phi of one query in shared memory (attention/estimators/feature_map.h) by float32
// multiply-adds: a matrix times one vector is bound by reading the matrix, and a query has no tile
// to fill. Internal to gpu/.
#pragma once

#include "gpu/device/tile.cuh"

namespace prefixd::gpu::internal {

__device__ inline float Gelu(float x) { return 0.5f * x * (1.0f + erff(x * 0.70710678118654752f)); }

inline constexpr uint32_t kVectorScratch = 4 * kThreads;  // floats of MatrixVector's scratch

// Calls finish(o, sum_i w[i][o] x[i]) for each output o, by one thread each. x: [n_in] in shared
// memory; w: [n_in][n_out]; scratch: kVectorScratch floats of shared memory. Block-wide; x must be
// visible to all threads.
//
// A thread takes four neighbouring outputs and a share of the inputs: all of the block's loads are
// on their way at once, because the time of one is all that there is to wait for.
template <typename Finish>
__device__ inline void MatrixVector(const float* x, uint32_t n_in, const float* w, uint32_t n_out,
                                    float* scratch, Finish finish) {
  for (uint32_t first = 0; first < n_out; first += kVectorScratch) {
    const uint32_t n = min(n_out - first, kVectorScratch);
    uint32_t lanes = 1;
    while (4 * lanes < n) lanes *= 2;
    const uint32_t shares = kThreads / lanes, share = threadIdx.x / lanes;
    const uint32_t o = first + 4 * (threadIdx.x % lanes);
    const bool wide = n_out % 4 == 0 && reinterpret_cast<uintptr_t>(w) % 16 == 0;
    float sum[4] = {};
#pragma unroll 8
    for (uint32_t i = share; i < n_in; i += shares) {
      const float* row = w + size_t{i} * n_out;
      if (wide && o < n_out) {
        const float4 four = *reinterpret_cast<const float4*>(row + o);
        sum[0] = fmaf(four.x, x[i], sum[0]);
        sum[1] = fmaf(four.y, x[i], sum[1]);
        sum[2] = fmaf(four.z, x[i], sum[2]);
        sum[3] = fmaf(four.w, x[i], sum[3]);
      } else {
#pragma unroll
        for (uint32_t e = 0; e < 4; ++e) {
          if (o + e < n_out) sum[e] = fmaf(row[o + e], x[i], sum[e]);
        }
      }
    }
    auto* own = reinterpret_cast<float4*>(scratch) + threadIdx.x;
    __syncthreads();  // scratch has been read since its previous use
    *own = make_float4(sum[0], sum[1], sum[2], sum[3]);
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < n; i += kThreads) {
      float whole = 0;
      for (uint32_t s = 0; s < shares; ++s) whole += scratch[s * 4 * lanes + i];
      finish(first + i, whole);
    }
  }
}

// Computes out[f] = log phi(x)[f]. All arrays are in shared memory: x [in_dim], out [d_phi], embed
// and hidden [d_emb] scratch, vector kVectorScratch floats. Block-wide; x must be visible to all
// threads. On return so is `out`.
__device__ inline void LogPhiOfQuery(const DeviceQueryMap& map, const float* x, float* embed,
                                     float* hidden, float* vector, float* out) {
  const float alpha = map.alpha;
  MatrixVector(x, map.in_dim, map.w_in, map.d_emb, vector,
               [=](uint32_t o, float g0) { embed[o] = g0 + map.b_in[o]; });
  __syncthreads();
  MatrixVector(embed, map.d_emb, map.w1, map.d_emb, vector,
               [=](uint32_t o, float h) { hidden[o] = Gelu(h + map.b1[o]); });
  __syncthreads();
  // The layer computes g1 = g0 + alpha h in place: each element is read and written by one thread
  // only.
  MatrixVector(hidden, map.d_emb, map.w2, map.d_emb, vector,
               [=](uint32_t o, float h) { embed[o] = fmaf(alpha, h + map.b2[o], embed[o]); });
  __syncthreads();
  MatrixVector(embed, map.d_emb, map.w_out, map.d_phi, vector,
               [=](uint32_t f, float g2) { out[f] = g2 + map.b_out[f]; });
  __syncthreads();
}

}  // namespace prefixd::gpu::internal
