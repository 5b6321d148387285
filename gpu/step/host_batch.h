// Packs a batch of attention/step/step.h inputs into one launch of the CUDA step. Internal to gpu/.
#pragma once

#include <functional>
#include <span>

#include "attention/step/step.h"
#include "gpu/device/host_image.h"
#include "gpu/step/pack_summary.h"
#include "prefixd/gpu/step.h"

namespace prefixd::gpu::internal {

// Makes the checks that the host can make, as GroupStep does, and checks that the groups agree with
// one another; returns the shape that covers them all.
Result<StepShape> CheckBatch(std::span<const GroupStepInput> in,
                             std::span<const GroupStepOutput> out);
// Elsewhere names the parts of a batch that need not be copied with it. Empty: everything is
// copied.
struct Elsewhere {
  std::span<const ResidentGroup* const> resident;  // [n_groups] or empty; null: copied
  std::function<bool(const RowsView&)> readable;   // rows that the device reads in place
};
// Lays out all inputs of a batch; returns their device addresses (no outputs, no workspace).
// REQUIRES: CheckBatch returned `shape`.
BatchStepArgs PackBatch(std::span<const GroupStepInput> in, const StepShape& shape,
                        HostImage& image, const Elsewhere& elsewhere = {});
// Returns the meaning of the error word of group `index`; names a bad row by the tensor it came in.
Status ExplainGroup(uint32_t word, std::span<const GroupStepInput> in, size_t index);

}  // namespace prefixd::gpu::internal
