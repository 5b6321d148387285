// Turns CUDA error codes into values. Internal to gpu/: includes a CUDA header.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "prefixd/result.h"

namespace prefixd::gpu::internal {

// `what` completes "CUDA: <what> failed". The function also clears the thread's non-sticky error,
// so that the next call does not report this one again.
inline Status CudaStatus(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return {};
  (void)cudaGetLastError();
  Code code = Code::kInternal;
  if (error == cudaErrorMemoryAllocation) {
    code = Code::kResourceExhausted;
  } else if (error == cudaErrorNoDevice || error == cudaErrorInsufficientDriver ||
             error == cudaErrorInitializationError || error == cudaErrorDevicesUnavailable ||
             error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDevice ||
             error == cudaErrorSystemDriverMismatch ||
             error == cudaErrorCompatNotSupportedOnDevice) {
    code = Code::kUnavailable;
  }
  return Error{code, std::string("CUDA: ") + what + " failed: " + cudaGetErrorString(error) + " (" +
                         cudaGetErrorName(error) + ")"};
}

}  // namespace prefixd::gpu::internal
