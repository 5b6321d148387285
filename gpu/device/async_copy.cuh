// Copies from global into shared memory while a thread computes. Internal to gpu/. The emulation
// (tests/gpu/emulated/emulated_cuda.h) makes the copies when they are waited for and not before.
#pragma once

#include "gpu/device/launch.cuh"

namespace prefixd::gpu::internal {

#if defined(__CUDACC__)

// Copies 16 bytes; both addresses 16-byte aligned. `from` may be pinned host memory.
__device__ inline void CopyAsync16(void* shared, const void* from) {
  const auto to = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
// Waits until all copies of the calling thread are done; others see them after a barrier.
__device__ inline void WaitForCopies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

#endif

}  // namespace prefixd::gpu::internal
