// Finds out whether a CUDA device can run this build's kernels, and describes it.
#pragma once

#include <cstddef>
#include <string>

#include "prefixd/result.h"

struct CUstream_st;  // the target of a cudaStream_t: naming a stream needs no CUDA header

namespace prefixd::gpu {

using Stream = CUstream_st*;  // nullptr: the legacy default stream

struct DeviceInfo {
  int ordinal = 0;
  std::string name;
  int major = 0, minor = 0;  // compute capability
  int multiprocessors = 0;
  size_t memory_bytes = 0;
  size_t shared_bytes_max = 0;  // dynamic shared memory that one block can opt in to
};

// Probes one device and checks that the kernels of this build load on it. kUnavailable, with the
// reason: no driver, no device, or a device that this build was not compiled for. Thread-safety:
// any thread; leaves the calling thread's current device unchanged.
Result<DeviceInfo> ProbeDevice(int ordinal = 0);

}  // namespace prefixd::gpu
