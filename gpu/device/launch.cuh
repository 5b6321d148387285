// Launches kernels and finds their dynamic shared memory. Internal to gpu/.
//
// Compiled by nvcc this is CUDA. The same kernels also compile as plain C++ against
// tests/gpu/emulated/emulated_cuda.h, which must be included first then: it runs a block's threads
// in turns on the CPU, so that the kernels' logic is tested on machines without a GPU.
#pragma once

#include "gpu/device/block_layout.h"

#if defined(__CUDACC__)

#include <cuda_runtime.h>

namespace prefixd::gpu::internal {

// Returns the block's dynamic shared memory, 16-byte aligned.
__device__ inline float* DynamicShared() {
  extern __shared__ float4 prefixd_dynamic_shared[];
  return reinterpret_cast<float*>(prefixd_dynamic_shared);
}

// Launches blocks of kThreads. Beyond 48 KiB of shared memory a kernel must opt in: shared_limit
// (0: no need) is the most the device gives, always the same value, because other threads may be
// launching the same kernel with other shapes.
template <typename Kernel, typename Params>
int Launch(Kernel* kernel, dim3 grid, size_t shared_bytes, size_t shared_limit,
           const Params& params, Stream stream) {
  if (shared_limit > 0) {
    const cudaError_t opted = cudaFuncSetAttribute(
        kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_limit));
    if (opted != cudaSuccess) return opted;
  }
  kernel<<<grid, kThreads, shared_bytes, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace prefixd::gpu::internal

#elif !defined(PREFIXD_EMULATED_CUDA)
#error "kernels need nvcc, or tests/gpu/emulated/emulated_cuda.h included first"
#endif
