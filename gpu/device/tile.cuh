// Defines block-wide pieces of the kernels: elements, dot products, reductions. Internal to gpu/.
//
// All kThreads threads of a block call every function here with the same arguments, unless the
// function's comment says otherwise.
#pragma once

#include <cuda_fp16.h>

#include "gpu/device/launch.cuh"

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
__device__ inline float Larger(float a, float b) { return fmaxf(a, b); }
__device__ inline double Larger(double a, double b) { return fmax(a, b); }
template <typename T>
__device__ inline T WarpMax(T x) {
  for (int offset = 16; offset > 0; offset /= 2) {
    x = Larger(x, __shfl_xor_sync(kFullMask, x, offset));
  }
  return x;
}

// Returns the sum or maximum over the block to every thread. Synchronises before and after.
template <typename T>
__device__ inline T BlockSum(T x) {
  __shared__ T part[kWarps];
  __syncthreads();  // `part` has been read since its previous use
  x = WarpSum(x);
  if (threadIdx.x % kWarp == 0) part[threadIdx.x / kWarp] = x;
  __syncthreads();
  T sum = 0;
  for (uint32_t w = 0; w < kWarps; ++w) sum += part[w];
  return sum;
}
template <typename T>
__device__ inline T BlockMax(T x) {
  __shared__ T part[kWarps];
  __syncthreads();
  x = WarpMax(x);
  if (threadIdx.x % kWarp == 0) part[threadIdx.x / kWarp] = x;
  __syncthreads();
  T max = part[0];
  for (uint32_t w = 1; w < kWarps; ++w) max = Larger(max, part[w]);
  return max;
}
// Returns the sum of the values of the threads before this one. Synchronises before and after.
__device__ inline uint32_t SumBefore(uint32_t own) {
  __shared__ uint32_t sum[kThreads];
  __syncthreads();  // `sum` has been read since its previous use
  sum[threadIdx.x] = own;
  __syncthreads();
  for (uint32_t offset = 1; offset < kThreads; offset *= 2) {
    const uint32_t before = threadIdx.x >= offset ? sum[threadIdx.x - offset] : 0;
    __syncthreads();
    sum[threadIdx.x] += before;
    __syncthreads();
  }
  return sum[threadIdx.x] - own;
}

__device__ inline bool Finite(float x) { return fabsf(x) <= 3.402823466e38f; }  // false for NaN

// Reports a fault of a group; the smallest of several words stays.
__device__ inline void Fault(uint32_t* errors, uint32_t group, GroupFault fault, uint32_t detail) {
  atomicMin(&errors[group], FaultWord(fault, detail));
}

// Returns the two 16-bit elements of a 32-bit word, the lower one first.
__device__ inline float2 Unpack(DType dtype, uint32_t word) {
  if (dtype == DType::kBf16) {
    return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u));
  }
  const auto half = [](uint32_t bits) {
    return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
  };
  return make_float2(half(word & 0xffffu), half(word >> 16));
}

// Returns element i of an array of 16-bit or float32 elements.
__device__ inline float Element(const void* data, DType dtype, uint32_t i) {
  if (dtype == DType::kF32) return static_cast<const float*>(data)[i];
  return Unpack(dtype, static_cast<const uint16_t*>(data)[i]).x;
}

// Computes out[g][r] = sum_j a[g][j] x[r][j], one warp per row: a [n_heads][lda], x [kTile][ldx], n
// columns, out [kMaxGroup][kTile]; rows from n_rows on and heads from n_heads on are not written.
// Sums are of type Sum: in float64 they are exact except for the last rounding, however much terms
// cancel.
template <typename Sum>
__device__ inline void DotTile(const Sum* a, size_t lda, uint32_t n_heads, const float* x,
                               size_t ldx, uint32_t n_rows, uint32_t n, Sum scale, float* out) {
  const uint32_t lane = threadIdx.x % kWarp;
  for (uint32_t r = threadIdx.x / kWarp; r < n_rows; r += kWarps) {
    for (uint32_t g = 0; g < n_heads; ++g) {
      Sum sum = 0;
      for (uint32_t j = lane; j < n; j += kWarp) {
        sum = fma(a[g * lda + j], static_cast<Sum>(x[r * ldx + j]), sum);
      }
      sum = WarpSum(sum);
      if (lane == 0) out[g * kTile + r] = static_cast<float>(scale * sum);
    }
  }
}

}  // namespace prefixd::gpu::internal
