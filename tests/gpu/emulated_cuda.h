// Just enough of CUDA to run the kernels of gpu/ on the CPU: the threads of a block are fibers that
// take turns in a random order, so that a missing barrier shows as a wrong result, and a barrier
// that not all threads reach is reported. Included before the kernels' sources by one test file.
//
// What it cannot show: hardware limits, memory ordering between warps without a barrier finer than
// a turn, and CUDA's own arithmetic (exp, erf and fused multiply-adds are the host's).
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>

#define PREFIXD_EMULATED_CUDA 1

#undef __global__
#undef __device__
#undef __host__
#undef __shared__
#undef __launch_bounds__
#undef __grid_constant__
#define __global__
#define __device__
#define __host__
#define __shared__ static  // one block runs at a time
#define __launch_bounds__(...)
#define __grid_constant__

namespace prefixd::gpu::emulated {

inline constexpr size_t kDynamicSharedBytes = 227 * 1024;

struct Index {
  uint32_t x = 0, y = 0, z = 0;
};
// Of the thread and block that is running.
const Index& ThreadIndex();
const Index& BlockIndex();
float* DynamicShared();

// Wait for the block, or for the thread's warp.
void BlockBarrier();
void WarpBarrier();
// The slot of thread `lane` of the running thread's warp, of the present or the previous exchange.
uint64_t& ExchangeSlot(uint32_t lane, bool odd);
// Counts the running thread's exchanges: alternates, so that one barrier suffices for each.
bool NextExchangeIsOdd();

// Runs body() as each of n_threads threads of each block. Returns false when threads of a block
// waited for different things (a barrier in divergent code). Shared memory starts as garbage (NaN).
bool RunGrid(dim3 grid, uint32_t n_threads, size_t shared_bytes, uint64_t seed,
             const std::function<void()>& body);
// For the next launches.
void SetSeed(uint64_t seed);
uint64_t Seed();

}  // namespace prefixd::gpu::emulated

#define threadIdx (::prefixd::gpu::emulated::ThreadIndex())
#define blockIdx (::prefixd::gpu::emulated::BlockIndex())

inline void __syncthreads() { prefixd::gpu::emulated::BlockBarrier(); }

template <typename T>
T __shfl_xor_sync(unsigned, T value, int lane_mask, int width = 32) {
  static_assert(sizeof(T) <= 8);
  const uint32_t lane = threadIdx.x % 32;
  const bool odd = prefixd::gpu::emulated::NextExchangeIsOdd();
  std::memcpy(&prefixd::gpu::emulated::ExchangeSlot(lane, odd), &value, sizeof(T));
  prefixd::gpu::emulated::WarpBarrier();
  const uint32_t other = lane ^ static_cast<uint32_t>(lane_mask);
  // Outside its sub-warp a thread reads itself.
  const bool inside = other / width == lane / width;
  std::memcpy(&value, &prefixd::gpu::emulated::ExchangeSlot(inside ? other : lane, odd), sizeof(T));
  return value;
}

inline uint32_t atomicMin(uint32_t* address, uint32_t value) {
  const uint32_t old = *address;
  *address = std::min(old, value);
  return old;
}
inline float __uint_as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

#include "gpu/step_layout.h"

namespace prefixd::gpu::internal {

using std::min;

inline float* DynamicShared() { return emulated::DynamicShared(); }

// As gpu/launch.cuh's; no CUDA call is made.
template <typename Kernel>
int Launch(Kernel* kernel, dim3 grid, size_t shared_bytes, size_t shared_limit,
           const StepParams& params, Stream) {
  constexpr size_t kWithoutOptIn = 48 * 1024;
  if (shared_bytes > (shared_limit > 0 ? shared_limit : kWithoutOptIn)) {
    return cudaErrorInvalidValue;
  }
  const bool converged =
      emulated::RunGrid(grid, kThreads, shared_bytes, emulated::Seed(), [&] { kernel(params); });
  return converged ? cudaSuccess : cudaErrorLaunchFailure;
}

}  // namespace prefixd::gpu::internal
