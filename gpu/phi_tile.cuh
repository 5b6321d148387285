// log phi of a tile of vectors in shared memory (attention/feature_map.h), float32 multiply-adds.
// Internal to gpu/.
#pragma once

#include "gpu/tile.cuh"

namespace prefixd::gpu::internal {

__device__ inline float Gelu(float x) { return 0.5f * x * (1.0f + erff(x * 0.70710678118654752f)); }

// For each of kRows vectors x_r and each output o: finish(r, o, b[o] + sum_i w[i][o] x_r[i]).
//   x: [kRows][ldx] in shared memory, 16-byte aligned rows; w: [n_in][n_out]; b: [n_out]
// A thread takes one output for up to eight vectors at a time: neighbouring threads read
// neighbouring weights, and all lanes of a warp read the same element of x.
template <uint32_t kRows, typename Finish>
__device__ inline void LinearTile(const float* x, size_t ldx, uint32_t n_in, const float* w,
                                  const float* b, uint32_t n_out, Finish finish) {
  constexpr uint32_t kChunk = kRows < 8 ? kRows : 8;
  static_assert(kRows % kChunk == 0);
  const uint32_t out_pad = (n_out + kWarp - 1) / kWarp * kWarp;
  for (uint32_t unit = threadIdx.x; unit < out_pad * (kRows / kChunk); unit += kThreads) {
    const uint32_t o = unit % out_pad;
    const uint32_t row0 = unit / out_pad * kChunk;
    if (o >= n_out) continue;
    float sum[kChunk];
#pragma unroll
    for (uint32_t r = 0; r < kChunk; ++r) sum[r] = b[o];
    uint32_t i = 0;
    for (; i + 4 <= n_in; i += 4) {
      const float w0 = w[size_t{i} * n_out + o], w1 = w[size_t{i + 1} * n_out + o];
      const float w2 = w[size_t{i + 2} * n_out + o], w3 = w[size_t{i + 3} * n_out + o];
#pragma unroll
      for (uint32_t r = 0; r < kChunk; ++r) {
        const float4 v = *reinterpret_cast<const float4*>(x + (row0 + r) * ldx + i);
        sum[r] = fmaf(w3, v.w, fmaf(w2, v.z, fmaf(w1, v.y, fmaf(w0, v.x, sum[r]))));
      }
    }
    for (; i < n_in; ++i) {
      const float wi = w[size_t{i} * n_out + o];
#pragma unroll
      for (uint32_t r = 0; r < kChunk; ++r) sum[r] = fmaf(wi, x[(row0 + r) * ldx + i], sum[r]);
    }
#pragma unroll
    for (uint32_t r = 0; r < kChunk; ++r) finish(row0 + r, o, sum[r]);
  }
}

// out[r][f] = log phi(x_r)[f] for kRows vectors. All in shared memory, 16-byte aligned rows:
//   x [kRows][Pad4(in_dim)], out [kRows][ld_out], embed and hidden [kRows][Pad4(d_emb)] scratch
// Block-wide; x must be visible to all threads. On return so is `out`.
template <uint32_t kRows>
__device__ inline void LogPhiTile(const DeviceFeatureMap& map, const float* x, float* embed,
                                  float* hidden, float* out, size_t ld_out) {
  const size_t ldx = Pad4(map.in_dim), ld = Pad4(map.d_emb);
  const float alpha = map.alpha;
  LinearTile<kRows>(x, ldx, map.in_dim, map.w_in, map.b_in, map.d_emb,
                    [=](uint32_t r, uint32_t o, float g0) { embed[r * ld + o] = g0; });
  __syncthreads();
  LinearTile<kRows>(embed, ld, map.d_emb, map.w1, map.b1, map.d_emb,
                    [=](uint32_t r, uint32_t o, float h) { hidden[r * ld + o] = Gelu(h); });
  __syncthreads();
  // g1 = g0 + alpha h, in place: each element is read and written by one thread only.
  LinearTile<kRows>(hidden, ld, map.d_emb, map.w2, map.b2, map.d_emb,
                    [=](uint32_t r, uint32_t o, float h) {
                      embed[r * ld + o] = fmaf(alpha, h, embed[r * ld + o]);
                    });
  __syncthreads();
  LinearTile<kRows>(embed, ld, map.d_emb, map.w_out, map.b_out, map.d_phi,
                    [=](uint32_t r, uint32_t f, float g2) { out[r * ld_out + f] = g2; });
  __syncthreads();
}

}  // namespace prefixd::gpu::internal
