// Checks arguments, plans and launches a Top-K. Host arithmetic, no kernels.
#include <cuda_runtime_api.h>

#include <string>

#include "gpu/device/argument_checks.h"
#include "gpu/device/cuda_status.h"
#include "gpu/topk/topk_layout.h"
#include "prefixd/gpu/step.h"
#include "prefixd/gpu/topk.h"

namespace prefixd::gpu {

using internal::CheckPointer;
using internal::CheckRange;
using internal::CudaStatus;

Result<TopKPlan> PlanTopK(const TopKShape& shape) {
  PREFIXD_TRY(CheckRange("group size", shape.group, 1, kMaxGroup));
  PREFIXD_TRY(CheckRange("n_groups", shape.n_groups, 1, 65535));  // CUDA's limit on a grid's y
  PREFIXD_TRY(CheckRange("key_dim", shape.key_dim, 1, kMaxDim));
  PREFIXD_TRY(CheckRange("max_keys", shape.max_keys, 1, kMaxTopKKeys));
  PREFIXD_TRY(CheckRange("max_k", shape.max_k, 0, kMaxTopK));
  PREFIXD_TRY(internal::CheckDType(shape.dtype));
  TopKPlan plan;
  plan.shape = shape;
  plan.workspace_bytes = internal::TopKLayout(shape).total_words() * sizeof(uint32_t);
  return plan;
}

Status LaunchTopK(const TopKPlan& plan, const TopKArgs& args, Stream stream) {
  PREFIXD_TRY(CheckPointer("queries", args.queries, 4));
  PREFIXD_TRY(CheckPointer("sources", args.sources, alignof(TopKSource)));
  if (plan.shape.max_k > 0) PREFIXD_TRY(CheckPointer("ids", args.ids, 4));
  PREFIXD_TRY(CheckPointer("counts", args.counts, 4));
  PREFIXD_TRY(CheckPointer("cuts", args.cuts, alignof(Cut)));
  PREFIXD_TRY(CheckPointer("errors", args.errors, 4));
  PREFIXD_TRY(CheckPointer("workspace", args.workspace, 16));
  PREFIXD_TRY(internal::CheckWorkspace(args.workspace_bytes, plan.workspace_bytes));
  const internal::TopKParams params{plan.shape, args};
  const internal::TopKLayout layout(plan.shape);
  PREFIXD_TRY(
      CudaStatus(cudaMemsetAsync(args.errors, 0xff, plan.shape.n_groups * sizeof(uint32_t), stream),
                 "clearing the error words"));
  PREFIXD_TRY(CudaStatus(
      cudaMemsetAsync(args.workspace, 0, layout.all_zero_words() * sizeof(uint32_t), stream),
      "clearing the histograms"));
  if (plan.shape.codes) {
    PREFIXD_TRY(CudaStatus(cudaError_t(internal::LaunchCodeQueryKernel(params, stream)),
                           "launching the code query kernel"));
  }
  PREFIXD_TRY(CudaStatus(cudaError_t(internal::LaunchScoreKernel(params, stream)),
                         "launching the score kernel"));
  return CudaStatus(cudaError_t(internal::LaunchSelectKernels(params, stream)),
                    "launching the selection kernels");
}

}  // namespace prefixd::gpu
