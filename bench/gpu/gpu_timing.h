// Times work on a CUDA stream: captured once in a graph, replayed, timed by events on the device.
#pragma once

#include <cuda_runtime_api.h>

#include <functional>
#include <string>
#include <vector>

#include "gpu/device/device_buffer.h"
#include "measure/timing/statistics.h"
#include "prefixd/result.h"

namespace prefixd::bench {

// Turns the result of a CUDA call into a value.
inline Status Cuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return {};
  return Error{Code::kInternal, std::string(what) + ": " + cudaGetErrorString(error)};
}

// Returns the seconds of one launch. `enqueue` puts `launches` of them on the stream; the spread is
// over `rounds` replays, each divided by `launches`, after two warm-up replays.
Result<Spread> TimeGraph(gpu::Stream stream, int rounds, double launches,
                         const std::function<Status()>& enqueue);

// Holds the copy engine's bytes per second between pinned host memory and the device, and within
// the device (reads and writes counted).
struct CopySpeeds {
  Spread link, device;
};
Result<CopySpeeds> MeasureCopies(gpu::Stream stream, int rounds);

}  // namespace prefixd::bench
