// Allocates device memory for a launch's outputs and workspace. Internal to gpu/, its tests and
// benchmarks.
#pragma once

#include "gpu/device/device_buffer.h"
#include "prefixd/gpu/exact.h"
#include "prefixd/gpu/topk.h"

namespace prefixd::gpu::internal {

// The memory must stay until the stream has passed the launch and its outputs were copied.
struct LaunchMemory {
  DeviceBuffer output, workspace;
};

template <typename Args>
Result<LaunchMemory> AllocateFor(size_t output_bytes, size_t workspace_bytes, Args& args) {
  LaunchMemory memory;
  PREFIXD_ASSIGN(memory.output, DeviceBuffer::Allocate(output_bytes));
  PREFIXD_ASSIGN(memory.workspace, DeviceBuffer::Allocate(workspace_bytes));
  args.workspace = memory.workspace.data();
  args.workspace_bytes = memory.workspace.bytes();
  return memory;
}

// Allocates for a launch of `plan`: all of args' outputs and its workspace, uninitialised.
inline Result<LaunchMemory> AllocateFor(const TopKPlan& plan, TopKArgs& args) {
  const size_t n = plan.shape.n_groups, ids = n * plan.shape.max_k;
  const size_t words = (ids + 2 * n) * sizeof(uint32_t);
  PREFIXD_ASSIGN(LaunchMemory memory, AllocateFor(words + n * plan.shape.group * sizeof(Cut),
                                                  plan.workspace_bytes, args));
  args.ids = memory.output.as<uint32_t>();
  args.counts = args.ids + ids;
  args.errors = args.counts + n;
  args.cuts = reinterpret_cast<Cut*>(args.errors + n);
  return memory;
}
inline Result<LaunchMemory> AllocateFor(const ExactPlan& plan, ExactArgs& args) {
  const size_t n = plan.shape.n_groups, queries = n * plan.shape.max_queries;
  const size_t y = queries * plan.shape.row.value_dim;
  PREFIXD_ASSIGN(LaunchMemory memory,
                 AllocateFor((y + queries + n) * sizeof(float), plan.workspace_bytes, args));
  args.y = memory.output.as<float>();
  args.lse = args.y + y;
  args.errors = reinterpret_cast<uint32_t*>(args.lse + queries);
  return memory;
}

}  // namespace prefixd::gpu::internal
