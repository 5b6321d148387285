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
// The same of several values at once.
template <uint32_t kCount>
__device__ inline void BlockSums(double (&x)[kCount]) {
  __shared__ double part[kCount][kWarps];
  __syncthreads();  // `part` has been read since its previous use
#pragma unroll
  for (uint32_t i = 0; i < kCount; ++i) {
    x[i] = WarpSum(x[i]);
    if (threadIdx.x % kWarp == 0) part[i][threadIdx.x / kWarp] = x[i];
  }
  __syncthreads();
#pragma unroll
  for (uint32_t i = 0; i < kCount; ++i) {
    x[i] = 0;
    for (uint32_t w = 0; w < kWarps; ++w) x[i] += part[i][w];
  }
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
  __shared__ uint32_t of_warp[kWarps];
  const uint32_t lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  uint32_t sum = own;
  for (uint32_t offset = 1; offset < kWarp; offset *= 2) {
    const uint32_t before = __shfl_sync(kFullMask, sum, static_cast<int>(lane - offset));
    if (lane >= offset) sum += before;
  }
  __syncthreads();  // the sums have been read since their previous use
  if (lane == kWarp - 1) of_warp[warp] = sum;
  __syncthreads();
  for (uint32_t w = 0; w < warp; ++w) sum += of_warp[w];
  return sum - own;
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

// Sums eight values over a warp: lane l returns the sum of value l / 4.
template <typename Sum>
__device__ inline Sum WarpSums(Sum (&value)[8]) {
  const uint32_t lane = threadIdx.x % kWarp;
  // Each exchange halves the values that a lane still adds up.
#pragma unroll
  for (uint32_t left = 4; left > 0; left /= 2) {
    const bool upper = lane & 4 * left;
#pragma unroll
    for (uint32_t i = 0; i < left; ++i) {
      const Sum kept = upper ? value[left + i] : value[i];
      const Sum given = upper ? value[i] : value[left + i];
      value[i] = kept + __shfl_xor_sync(kFullMask, given, static_cast<int>(4 * left));
    }
  }
  Sum sum = value[0] + __shfl_xor_sync(kFullMask, value[0], 2);
  return sum + __shfl_xor_sync(kFullMask, sum, 1);
}

// Computes out[g][r] = sum_j a[g][j] x[r][j], two rows to a warp and four heads at a time: a
// [n_heads][lda], x [kTile][ldx], n columns, out [kMaxGroup][kTile]; heads from n_heads on are not
// written. Sums are of type Sum: in float64 they are exact except for the last rounding, however
// much terms cancel.
template <typename Sum>
__device__ inline void DotTile(const Sum* a, size_t lda, uint32_t n_heads, const float* x,
                               size_t ldx, uint32_t n, Sum scale, float* out) {
  static_assert(kTile == 2 * kWarps);
  const uint32_t lane = threadIdx.x % kWarp, row = threadIdx.x / kWarp;
  for (uint32_t head0 = 0; head0 < n_heads; head0 += 4) {
    Sum sums[8] = {};
#pragma unroll 4
    for (uint32_t j = lane; j < n; j += kWarp) {
      const Sum first = x[row * ldx + j], second = x[(row + kWarps) * ldx + j];
#pragma unroll
      for (uint32_t h = 0; h < 4; ++h) {
        const Sum weight = a[min(head0 + h, n_heads - 1) * lda + j];
        sums[h] = fma(weight, first, sums[h]);
        sums[4 + h] = fma(weight, second, sums[4 + h]);
      }
    }
    const Sum sum = WarpSums(sums);
    const uint32_t of = lane / 4, head = head0 + of % 4;
    if (lane % 4 == 0 && head < n_heads) {
      out[head * kTile + row + of / 4 * kWarps] = static_cast<float>(scale * sum);
    }
  }
}

}  // namespace prefixd::gpu::internal
