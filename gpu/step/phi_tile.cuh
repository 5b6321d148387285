// Computes log phi_k of a tile of keys on tensor cores (attention/estimators/feature_map.h;
// prefixd/gpu/phi_pack.h states the precision). Internal to gpu/.
#pragma once

#include "gpu/device/mma.cuh"
#include "gpu/step/phi_query.cuh"
#include "gpu/step/step_layout.h"
#include "prefixd/gpu/phi_pack.h"

namespace prefixd::gpu::internal {

// Activations hold x [kTile][n] as bf16 pairs: high parts of all rows, then low parts, each row
// ActivationWords(n) words; columns from n on are zeros.
struct Activations {
  uint32_t* words;
  uint32_t n;

  __device__ size_t ld() const { return ActivationWords(n); }
  __device__ uint32_t* high() const { return words; }
  __device__ uint32_t* low() const { return words + kTile * ld(); }
  // Stores columns 2 * pair and 2 * pair + 1 of a row.
  __device__ void Put(uint32_t row, uint32_t pair, float x, float y) const {
    uint32_t parts[2];
    SplitPair(x, y, parts);
    high()[row * ld() + pair] = parts[0];
    low()[row * ld() + pair] = parts[1];
  }
};

// x: [kTile][ldx] float32 in shared memory.
__device__ inline void SplitTile(const float* x, size_t ldx, const Activations& out) {
  const uint32_t pairs = (out.n + 15) / 16 * 8;
  for (uint32_t i = threadIdx.x; i < kTile * pairs; i += kThreads) {
    const uint32_t row = i / pairs, j = i % pairs * 2;
    const float first = j < out.n ? x[row * ldx + j] : 0.0f;
    const float second = j + 1 < out.n ? x[row * ldx + j + 1] : 0.0f;
    out.Put(row, j / 2, first, second);
  }
}

// Calls finish(r, o, y[o], y[o + 1]) for rows r of the tile and pairs of outputs (o, o + 1), o
// even, with y = W x + b, and zeros beyond n_out up to a multiple of 16. A warp takes sixteen
// outputs of all 16 rows at a time; its weights come from global memory, 16 bytes a lane, and the
// three products of a split number are summed apart, so that none waits for another.
template <typename Finish>
__device__ inline void LinearTile(const Activations& x, const uint32_t* w, const float* b,
                                  uint32_t n_out, Finish finish) {
  const uint32_t lane = threadIdx.x % kWarp, r = lane / 4, c = lane % 4;
  const uint32_t tiles_in = (x.n + kTileIn - 1) / kTileIn;
  const uint32_t tiles_out = (n_out + kTileOut - 1) / kTileOut;
  const size_t ld = x.ld();
  for (uint32_t t = 2 * (threadIdx.x / kWarp); t < tiles_out; t += 2 * kWarps) {
    float sum[2][3][4] = {};  // [tile][product]
    const uint4* tile = reinterpret_cast<const uint4*>(w) + size_t{t} * tiles_in * kWarp + lane;
    const uint32_t second = t + 1 < tiles_out ? tiles_in * kWarp : 0;  // read twice, else
#pragma unroll 4
    for (uint32_t k = 0; k < tiles_in; ++k) {
      const uint4 weight[2] = {tile[k * kWarp], tile[k * kWarp + second]};
      const uint32_t* high = x.high() + r * ld + 8 * k + c;
      const uint32_t* low = x.low() + r * ld + 8 * k + c;
      const uint32_t a[4] = {high[0], high[8 * ld], high[4], high[8 * ld + 4]};
      const uint32_t rest[4] = {low[0], low[8 * ld], low[4], low[8 * ld + 4]};
#pragma unroll
      for (uint32_t i = 0; i < 2; ++i) {
        Mma(sum[i][0], rest, weight[i].x, weight[i].y);
        Mma(sum[i][1], a, weight[i].z, weight[i].w);
        Mma(sum[i][2], a, weight[i].x, weight[i].y);
      }
    }
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
      const uint32_t o = (t + i) * kTileOut + 2 * c;
      const bool there = t + i < tiles_out;
      float y[4];
#pragma unroll
      for (uint32_t e = 0; e < 4; ++e) {
        const float bias = o + e % 2 < n_out ? b[o + e % 2] : 0.0f;
        y[e] = (there ? sum[i][0][e] + sum[i][1][e] + sum[i][2][e] : 0.0f) + bias;
      }
      finish(r, o, y[0], y[1]);
      finish(r + 8, o, y[2], y[3]);
    }
  }
}

// PhiScratch is LogPhiTile's scratch in shared memory (SplitShared).
struct PhiScratch {
  float *first, *next, *embed;
};

// Computes out[r][f] = log phi(x_r)[f] for a tile of vectors x [kTile][ldx] in shared memory; out
// [kTile][ld_out] may be scratch.first. Block-wide; x must be visible to all threads. On return so
// is `out`.
__device__ inline void LogPhiTile(const DeviceKeyMap& map, const float* x, size_t ldx,
                                  const PhiScratch& scratch, float* out, size_t ld_out) {
  const Activations keys{reinterpret_cast<uint32_t*>(scratch.first), map.in_dim};
  const Activations gelu{reinterpret_cast<uint32_t*>(scratch.first), map.d_emb};
  const Activations embedded{reinterpret_cast<uint32_t*>(scratch.next), map.d_emb};
  float* embed = scratch.embed;
  const size_t ld = Pad4(map.d_emb);
  const uint32_t d_emb = map.d_emb, d_phi = map.d_phi;
  const float alpha = map.alpha;

  SplitTile(x, ldx, keys);
  __syncthreads();
  LinearTile(keys, map.w_in, map.b_in, d_emb, [=](uint32_t r, uint32_t o, float g0, float g1) {
    embedded.Put(r, o / 2, g0, g1);
    if (o < d_emb) embed[r * ld + o] = g0;
    if (o + 1 < d_emb) embed[r * ld + o + 1] = g1;
  });
  __syncthreads();
  LinearTile(embedded, map.w1, map.b1, d_emb, [=](uint32_t r, uint32_t o, float h0, float h1) {
    gelu.Put(r, o / 2, Gelu(h0), Gelu(h1));
  });
  __syncthreads();
  LinearTile(gelu, map.w2, map.b2, d_emb, [=](uint32_t r, uint32_t o, float h0, float h1) {
    embedded.Put(r, o / 2, o < d_emb ? fmaf(alpha, h0, embed[r * ld + o]) : 0.0f,
                 o + 1 < d_emb ? fmaf(alpha, h1, embed[r * ld + o + 1]) : 0.0f);
  });
  __syncthreads();
  LinearTile(embedded, map.w_out, map.b_out, d_phi,
             [=](uint32_t r, uint32_t f, float y0, float y1) {
               if (f < d_phi) out[r * ld_out + f] = y0;
               if (f + 1 < d_phi) out[r * ld_out + f + 1] = y1;
             });
  __syncthreads();
}

}  // namespace prefixd::gpu::internal
