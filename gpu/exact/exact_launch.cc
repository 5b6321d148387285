// Checks arguments, plans and launches exact attention. Host arithmetic, no kernels.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <string>

#include "gpu/device/argument_checks.h"
#include "gpu/device/cuda_status.h"
#include "gpu/exact/exact_layout.h"
#include "prefixd/gpu/exact.h"

namespace prefixd::gpu {

using internal::CheckPointer;
using internal::CheckRange;
using internal::CudaStatus;

Result<ExactPlan> PlanExact(const ExactShape& shape, const DeviceInfo& device) {
  PREFIXD_TRY(CheckRange("n_groups", shape.n_groups, 1, 65535));  // CUDA's limit on a grid's y
  PREFIXD_TRY(CheckRange("key_dim", shape.row.key_dim, 1, kMaxDim));
  PREFIXD_TRY(CheckRange("value_dim", shape.row.value_dim, 1, kMaxDim));
  PREFIXD_TRY(CheckRange("max_queries", shape.max_queries, 1, kMaxExactQueries));
  PREFIXD_TRY(CheckRange("max_rows", shape.max_rows, 0, kMaxExactRows));
  PREFIXD_TRY(internal::CheckDType(shape.row.dtype));
  ExactPlan plan;
  plan.shape = shape;
  // The plan has two blocks for each multiprocessor, but at least eight tiles of rows to a block.
  const uint32_t blocks =
      shape.n_groups * ((shape.max_queries + internal::kQueryTile - 1) / internal::kQueryTile);
  const uint32_t tiles = (shape.max_rows + internal::kExactRows - 1) / internal::kExactRows;
  const uint32_t wanted = 2 * static_cast<uint32_t>(std::max(device.multiprocessors, 1));
  plan.n_splits = std::clamp(std::min((wanted + blocks - 1) / blocks, tiles / 8), 1u, 256u);
  plan.workspace_bytes = internal::ExactLayout(shape, plan.n_splits).total_floats() * sizeof(float);
  plan.shared_bytes = internal::ExactShared(shape.row).total * sizeof(uint32_t);
  plan.shared_limit = device.shared_bytes_max;
  if (plan.shared_bytes > plan.shared_limit) {
    return InvalidArgument("gpu: this shape needs " + std::to_string(plan.shared_bytes) +
                           " bytes of shared memory; " + device.name + " gives a block " +
                           std::to_string(plan.shared_limit));
  }
  return plan;
}

Status LaunchExact(const ExactPlan& plan, const ExactArgs& args, Stream stream) {
  PREFIXD_TRY(CheckPointer("sources", args.sources, alignof(ExactSource)));
  PREFIXD_TRY(CheckPointer("y", args.y, 4));
  PREFIXD_TRY(CheckPointer("lse", args.lse, 4));
  PREFIXD_TRY(CheckPointer("errors", args.errors, 4));
  PREFIXD_TRY(CheckPointer("workspace", args.workspace, 16));
  PREFIXD_TRY(internal::CheckWorkspace(args.workspace_bytes, plan.workspace_bytes));
  const internal::ExactParams params{plan.shape, plan.n_splits, args};
  PREFIXD_TRY(
      CudaStatus(cudaMemsetAsync(args.errors, 0xff, plan.shape.n_groups * sizeof(uint32_t), stream),
                 "clearing the error words"));
  PREFIXD_TRY(CudaStatus(cudaError_t(internal::LaunchExactKernel(params, plan, stream)),
                         "launching the exact kernel"));
  return CudaStatus(cudaError_t(internal::LaunchExactMergeKernel(params, stream)),
                    "launching the merge of exact states");
}

}  // namespace prefixd::gpu
