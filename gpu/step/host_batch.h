// A batch of attention/step/step.h inputs as one launch of the CUDA step. Internal to gpu/.
#pragma once

#include <functional>
#include <span>

#include "attention/step/step.h"
#include "gpu/device/host_image.h"
#include "gpu/step/pack_summary.h"
#include "prefixd/gpu/step.h"

namespace prefixd::gpu::internal {

// Checks what the host can check, as GroupStep does, and that the groups agree with one another;
// returns the shape that covers them all.
Result<StepShape> CheckBatch(std::span<const GroupStepInput> in,
                             std::span<const GroupStepOutput> out);
// What of a batch need not be copied with it. Empty: everything is.
struct Elsewhere {
  std::span<const ResidentGroup* const> resident;  // [n_groups] or empty; null: copied
  std::function<bool(const RowsView&)> readable;   // rows that the device reads where they lie
};
// Lays out all inputs of a batch; returns their device addresses (no outputs, no workspace).
// REQUIRES: CheckBatch returned `shape`.
BatchStepArgs PackBatch(std::span<const GroupStepInput> in, const StepShape& shape,
                        HostImage& image, const Elsewhere& elsewhere = {});
// What the error word of group `index` says; names a bad row by the tensor it came in.
Status ExplainGroup(uint32_t word, std::span<const GroupStepInput> in, size_t index);

}  // namespace prefixd::gpu::internal
