// Block-wide pieces of the step kernels: staging rows, dot products, reductions. Internal to gpu/.
//
// Every function here is called by all kThreads threads of a block with the same arguments, unless
// it says otherwise.
#pragma once

#include <cuda_fp16.h>

#include "gpu/launch.cuh"

namespace prefixd::gpu::internal {

inline constexpr uint32_t kWarp = 32;
inline constexpr uint32_t kWarps = kThreads / kWarp;
inline constexpr unsigned kFullMask = 0xffffffffu;

__device__ inline float WarpSum(float x) {
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(kFullMask, x, offset);
  return x;
}
__device__ inline double WarpSum(double x) {
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(kFullMask, x, offset);
  return x;
}
__device__ inline float WarpMax(float x) {
  for (int offset = 16; offset > 0; offset /= 2) {
    x = fmaxf(x, __shfl_xor_sync(kFullMask, x, offset));
  }
  return x;
}

// The sum or maximum over the block, known to every thread. Synchronises before and after.
template <typename T>
__device__ inline T BlockSum(T x) {
  __shared__ T part[kWarps];
  __syncthreads();  // the previous use of `part` has been read
  x = WarpSum(x);
  if (threadIdx.x % kWarp == 0) part[threadIdx.x / kWarp] = x;
  __syncthreads();
  T sum = 0;
  for (uint32_t w = 0; w < kWarps; ++w) sum += part[w];
  return sum;
}
__device__ inline float BlockMax(float x) {
  __shared__ float part[kWarps];
  __syncthreads();
  x = WarpMax(x);
  if (threadIdx.x % kWarp == 0) part[threadIdx.x / kWarp] = x;
  __syncthreads();
  float max = part[0];
  for (uint32_t w = 1; w < kWarps; ++w) max = fmaxf(max, part[w]);
  return max;
}

__device__ inline bool Finite(float x) { return fabsf(x) <= 3.402823466e38f; }  // false for NaN

// Reports a fault of a group; of several, the smallest word stays.
__device__ inline void Fault(uint32_t* errors, uint32_t group, GroupFault fault, uint32_t detail) {
  atomicMin(&errors[group], FaultWord(fault, detail));
}

// One row being taken apart: element e < key_dim belongs to the key, the rest to the value.
struct RowSink {
  float* k;  // [key_dim] in shared memory
  float* v;  // [value_dim]
  uint32_t key_dim;
  bool key_bad = false, value_bad = false;

  __device__ void Put(uint32_t e, float x) {
    if (e < key_dim) {
      k[e] = x;
      key_bad |= !Finite(x);
    } else {
      v[e - key_dim] = x;
      value_bad |= !Finite(x);
    }
  }
};

// Two 16-bit elements of a 32-bit word, the lower one first.
__device__ inline float2 Unpack(DType dtype, uint32_t word) {
  if (dtype == DType::kBf16) {
    return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u));
  }
  const auto half = [](uint32_t bits) {
    return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
  };
  return make_float2(half(word & 0xffffu), half(word >> 16));
}

// One warp copies one row into shared memory as float32. `row`: [key_dim + value_dim] elements,
// aligned to its element size; 16-byte loads where the address and the length allow them.
__device__ inline void StageRow(const void* row, DType dtype, uint32_t n, RowSink& sink) {
  const uint32_t lane = threadIdx.x % kWarp;
  const uint32_t bytes = n * ElementBytes(dtype);
  if (reinterpret_cast<uintptr_t>(row) % 16 == 0 && bytes % 16 == 0) {
    const uint4* words = static_cast<const uint4*>(row);
    for (uint32_t i = lane; i < bytes / 16; i += kWarp) {
      const uint4 four = words[i];
      const uint32_t word[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (uint32_t j = 0; j < 4; ++j) {
        if (dtype == DType::kF32) {
          sink.Put(4 * i + j, __uint_as_float(word[j]));
        } else {
          const float2 pair = Unpack(dtype, word[j]);
          sink.Put(8 * i + 2 * j, pair.x);
          sink.Put(8 * i + 2 * j + 1, pair.y);
        }
      }
    }
    return;
  }
  for (uint32_t e = lane; e < n; e += kWarp) {
    if (dtype == DType::kF32) {
      sink.Put(e, static_cast<const float*>(row)[e]);
    } else {
      sink.Put(e, Unpack(dtype, static_cast<const uint16_t*>(row)[e]).x);
    }
  }
}

// out[g][r] = sum_j a[g][j] x[r][j], one warp per row: a [n_heads][lda], x [kTile][ldx], n columns,
// out [kMaxGroup][kTile]; rows from n_rows on and heads from n_heads on are not written.
__device__ inline void DotTile(const float* a, size_t lda, uint32_t n_heads, const float* x,
                               size_t ldx, uint32_t n_rows, uint32_t n, float* out) {
  const uint32_t lane = threadIdx.x % kWarp;
  for (uint32_t r = threadIdx.x / kWarp; r < n_rows; r += kWarps) {
    for (uint32_t g = 0; g < n_heads; ++g) {
      float sum = 0;
      for (uint32_t j = lane; j < n; j += kWarp) sum = fmaf(a[g * lda + j], x[r * ldx + j], sum);
      sum = WarpSum(sum);
      if (lane == 0) out[g * kTile + r] = sum;
    }
  }
}

}  // namespace prefixd::gpu::internal
