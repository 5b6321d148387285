// Runs the CUDA step, and exact attention, for callers whose tensors are in host memory: the same
// input and output as attention/step/step.h's GroupStep and ExactAttention. It copies data that is
// not on the device yet, runs one launch, copies back and waits. Summaries, maps and anchors stay
// there from step to step (gpu/step/resident.h) where their owner is named; the device gathers
// retrieved rows in place from memory that is registered with it (gpu/device/host_register.h). An
// engine's own hot path calls LaunchStep (prefixd/gpu/step.h).
#pragma once

#include <memory>
#include <span>

#include "attention/step/step.h"
#include "gpu/device/device_buffer.h"
#include "gpu/step/resident.h"
#include "prefixd/gpu/device.h"

namespace prefixd::gpu {

// A HostStep owns a stream and buffers that grow with use. Move-only; one thread at a time.
class HostStep {
 public:
  // Returns kUnavailable when there is no device (ProbeDevice).
  static Result<HostStep> Create(int ordinal = 0);

  const DeviceInfo& device() const { return device_; }

  // Runs GroupStep for each input. All groups of a batch agree in group size, dimensions, row dtype
  // and layer; phi groups in d_phi. The first group's error is returned, with its index when there
  // are several; then no output means anything. Errors are those of GroupStep, and CUDA's.
  Status Run(std::span<const GroupStepInput> in, std::span<const GroupStepOutput> out) {
    return Run(in, out, nullptr, nullptr);
  }
  // resident: holds the kept parts of all groups, whose owner is `owner`; null: they are copied
  // too.
  Status Run(std::span<const GroupStepInput> in, std::span<const GroupStepOutput> out,
             ResidentSummaries* resident, const std::shared_ptr<const void>& owner);

  // Runs ExactAttention: queries [n_queries][key_dim] over `rows`, which stay in place if the
  // device can read them there; rows given by their addresses, only for one tile of queries. Errors
  // are those of ExactAttention, and CUDA's.
  Status AttendExact(std::span<const float> queries, uint32_t n_queries, const LayerGeometry& layer,
                     const RowsView& rows, std::span<float> y, std::span<float> lse);

 private:
  DeviceInfo device_;
  OwnedStream stream_;
  PinnedBuffer staging_;
  DeviceBuffer input_, workspace_, output_;
};

}  // namespace prefixd::gpu
