// Just enough of CUDA to run the kernels of gpu/ on the CPU: the threads of a block are fibers that
// take turns in a random order, so that a missing barrier shows as a wrong result, and a barrier
// that not all threads reach is reported. Included before the kernels' sources by one test file.
//
// Asynchronous copies are made when they are waited for and not before; tensor-core products take
// their fragments from all lanes of the warp as the hardware does.
//
// What it cannot show: hardware limits, memory ordering between warps without a barrier finer than
// a turn, and CUDA's own arithmetic (exp, erf and fused multiply-adds are the host's, and a tensor
// core's sum of 16 products is rounded once).
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
// What a thread shows to its warp: the slot of thread `lane`, of the present or the previous
// exchange.
struct Slot {
  std::byte bytes[32];
};
Slot& ExchangeSlot(uint32_t lane, bool odd);
// Counts the running thread's exchanges: alternates, so that one barrier suffices for each.
bool NextExchangeIsOdd();

// A copy that the running thread has begun, and the end of all of them.
void BeginCopy(void* to, const void* from, size_t bytes);
void FinishCopies();

// Runs body() as each of n_threads threads of each block. Returns false when threads of a block
// waited for different things (a barrier in divergent code). Shared memory starts as garbage (NaN).
bool RunGrid(dim3 grid, uint32_t n_threads, size_t shared_bytes, uint64_t seed,
             const std::function<void()>& body);
// Runs the kernel in the order of the stream (emulated_device.cc); on the default stream, at once.
int Enqueue(CUstream_st* stream, std::function<int()> kernel);
// For the next launches.
void SetSeed(uint64_t seed);
uint64_t Seed();

}  // namespace prefixd::gpu::emulated

#define threadIdx (::prefixd::gpu::emulated::ThreadIndex())
#define blockIdx (::prefixd::gpu::emulated::BlockIndex())

inline void __syncthreads() { prefixd::gpu::emulated::BlockBarrier(); }

namespace prefixd::gpu::emulated {

// Shows a value to the whole warp; Seen(lane) then is what that lane showed.
template <typename T>
class Exchange {
 public:
  explicit Exchange(const T& mine) : odd_(NextExchangeIsOdd()) {
    static_assert(sizeof(T) <= sizeof(Slot));
    std::memcpy(&ExchangeSlot(threadIdx.x % 32, odd_), &mine, sizeof(T));
    WarpBarrier();
  }
  T Seen(uint32_t lane) const {
    T value;
    std::memcpy(&value, &ExchangeSlot(lane, odd_), sizeof(T));
    return value;
  }

 private:
  const bool odd_;
};

}  // namespace prefixd::gpu::emulated

template <typename T>
T __shfl_xor_sync(unsigned, T value, int lane_mask, int width = 32) {
  const prefixd::gpu::emulated::Exchange<T> exchange(value);
  const uint32_t lane = threadIdx.x % 32, other = lane ^ static_cast<uint32_t>(lane_mask);
  // Outside its sub-warp a thread reads itself.
  return exchange.Seen(other / width == lane / width ? other : lane);
}
template <typename T>
T __shfl_sync(unsigned, T value, int from) {
  return prefixd::gpu::emulated::Exchange<T>(value).Seen(static_cast<uint32_t>(from) % 32);
}
inline unsigned __ballot_sync(unsigned, bool vote) {
  const prefixd::gpu::emulated::Exchange<bool> exchange(vote);
  unsigned votes = 0;
  for (uint32_t lane = 0; lane < 32; ++lane) votes |= unsigned{exchange.Seen(lane)} << lane;
  return votes;
}
// Four products of signed bytes.
inline int __dp4a(int a, int b, int c) {
  for (int shift = 0; shift < 32; shift += 8) c += int8_t(a >> shift) * int8_t(b >> shift);
  return c;
}
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }

inline uint32_t atomicMin(uint32_t* address, uint32_t value) {
  const uint32_t old = *address;
  *address = std::min(old, value);
  return old;
}
inline uint32_t atomicMax(uint32_t* address, uint32_t value) {
  const uint32_t old = *address;
  *address = std::max(old, value);
  return old;
}
inline uint32_t atomicAdd(uint32_t* address, uint32_t value) {
  const uint32_t old = *address;
  *address += value;
  return old;
}
inline uint32_t __float_as_uint(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}
inline float __uint_as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

#include "gpu/step/step_layout.h"

namespace prefixd::gpu::internal {

using std::max;
using std::min;

inline void CopyAsync16(void* shared, const void* from) { emulated::BeginCopy(shared, from, 16); }
inline void WaitForCopies() { emulated::FinishCopies(); }

// bf16(low) in the lower half, bf16(high) in the upper, rounded to nearest even.
inline uint32_t PackBf16(float low, float high) {
  const auto round = [](float x) {
    const uint32_t bits = __float_as_uint(x);
    return (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  };
  return round(low) | round(high) << 16;
}

// As gpu/device/mma.cuh's.
inline void LoadMatrices(uint32_t (&out)[4], const uint32_t* row) {
  const emulated::Exchange<const uint32_t*> exchange(row);
  const uint32_t lane = threadIdx.x % 32;
  for (uint32_t i = 0; i < 4; ++i) out[i] = exchange.Seen(8 * i + lane / 4)[lane % 4];
}
inline void LoadTransposed(uint32_t (&out)[4], const uint32_t* row) {
  const emulated::Exchange<const uint32_t*> exchange(row);
  const uint32_t lane = threadIdx.x % 32, column = lane / 4;
  const auto element = [&](uint32_t i, uint32_t of) {
    return exchange.Seen(8 * i + of)[column / 2] >> 16 * (column % 2) & 0xffffu;
  };
  for (uint32_t i = 0; i < 4; ++i) {
    out[i] = element(i, lane % 4 * 2) | element(i, lane % 4 * 2 + 1) << 16;
  }
}

// c += A B with the fragments of gpu/device/mma.cuh.
inline void Mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  struct Fragments {
    uint32_t a[4], b[2];
  };
  const emulated::Exchange<Fragments> exchange({{a[0], a[1], a[2], a[3]}, {b0, b1}});
  const auto element = [](uint32_t word, uint32_t odd) {
    return double{__uint_as_float(odd ? word & 0xffff0000u : word << 16)};
  };
  const uint32_t lane = threadIdx.x % 32;
  double sum[4] = {c[0], c[1], c[2], c[3]};
  for (uint32_t k = 0; k < 16; ++k) {
    const uint32_t pair = k % 8 / 2, second = k / 8;
    const Fragments of_rows = exchange.Seen(lane / 4 * 4 + pair);
    const Fragments of_columns[2] = {exchange.Seen(lane % 4 * 2 * 4 + pair),
                                     exchange.Seen((lane % 4 * 2 + 1) * 4 + pair)};
    for (uint32_t i = 0; i < 4; ++i) {
      sum[i] += element(of_rows.a[i / 2 + 2 * second], k % 2) *
                element(of_columns[i % 2].b[second], k % 2);
    }
  }
  for (uint32_t i = 0; i < 4; ++i) c[i] = static_cast<float>(sum[i]);
}

inline float* DynamicShared() { return emulated::DynamicShared(); }

// As gpu/device/launch.cuh's.
template <typename Kernel, typename Params>
int Launch(Kernel* kernel, dim3 grid, size_t shared_bytes, size_t shared_limit,
           const Params& params, Stream stream) {
  constexpr size_t kWithoutOptIn = 48 * 1024;
  if (shared_bytes > (shared_limit > 0 ? shared_limit : kWithoutOptIn)) {
    return cudaErrorInvalidValue;
  }
  return emulated::Enqueue(stream, [=]() -> int {
    const bool converged =
        emulated::RunGrid(grid, kThreads, shared_bytes, emulated::Seed(), [&] { kernel(params); });
    return converged ? cudaSuccess : cudaErrorLaunchFailure;
  });
}

}  // namespace prefixd::gpu::internal
