// A whole device on host memory: what gpu/ asks of CUDA's runtime (memory, streams, copies), beside
// the kernels on emulated blocks (emulated_cuda.h). A program that links these sources
// (prefixd_emulated_gpu in CMake) finds one device, whose work is done where it runs: so all of
// gpu/ that runs on the host, and what uses it, is tested where there is no GPU.
//
// Work on a stream is done when the stream is waited for and not before; memory of the device
// starts as garbage; copies that reach beyond an allocation are errors, and so is launching on
// memory that was freed. Any thread.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace prefixd::gpu::emulated {

// From now on work on streams fails with this, as a device does that is lost; cudaSuccess: no more.
void FailWith(cudaError_t error);
// Kernels run since the program began.
uint64_t KernelsRun();
// Bytes of device memory that are allocated.
size_t DeviceBytes();

}  // namespace prefixd::gpu::emulated
