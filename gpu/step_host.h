// The CUDA step for callers whose tensors are in host memory: the same input and output as
// attention/step.h's GroupStep. Copies everything to the device, runs one launch, copies back and
// waits. Meant for choosing a device at run time without another data path, and for tests; a hot
// path keeps summaries, maps and rows on the device and calls LaunchStep (gpu/step_gpu.h).
#pragma once

#include <span>

#include "attention/step.h"
#include "gpu/device.h"
#include "gpu/device_buffer.h"

namespace prefixd::gpu {

// Owns a stream and buffers that grow with use. Move-only; one thread at a time.
class HostStep {
 public:
  // kUnavailable when there is no device (ProbeDevice).
  static Result<HostStep> Create(int ordinal = 0);

  const DeviceInfo& device() const { return device_; }

  // GroupStep for each input. All groups of a batch agree in group size, dimensions, row dtype and
  // layer; phi groups in d_phi. The first group's error is returned, with its index when there are
  // several; then no output means anything. Errors as GroupStep, and what CUDA reports.
  Status Run(std::span<const GroupStepInput> in, std::span<const GroupStepOutput> out);
  Status Run(const GroupStepInput& in, const GroupStepOutput& out) {
    return Run(std::span(&in, 1), std::span(&out, 1));
  }

 private:
  DeviceInfo device_;
  OwnedStream stream_;
  PinnedBuffer staging_;
  DeviceBuffer input_, workspace_, output_;
};

}  // namespace prefixd::gpu
