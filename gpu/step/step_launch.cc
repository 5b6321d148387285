// Checks arguments, plans and launches a step. Host arithmetic, no kernels.
#include <algorithm>
#include <string>

#include "gpu/device/argument_checks.h"
#include "gpu/device/cuda_status.h"
#include "gpu/step/step_layout.h"
#include "prefixd/gpu/step.h"

namespace prefixd::gpu {
namespace {

using internal::CheckPointer;
using internal::CheckRange;
using internal::CudaStatus;
using internal::kTile;

// Returns enough splits to fill every multiprocessor with two blocks, as many as run there at once,
// but never so many that a split has less than two tiles: a partial state costs as much as some
// rows.
uint32_t ChooseSplits(const StepShape& shape, int multiprocessors) {
  const uint32_t tiles = (shape.max_rows + kTile - 1) / kTile;
  const uint32_t wanted = 2 * static_cast<uint32_t>(std::max(multiprocessors, 1));
  return std::clamp(std::min(wanted / shape.n_groups, tiles / 2), 1u, 256u);
}

Status CheckArgs(const StepPlan& plan, const BatchStepArgs& args) {
  PREFIXD_TRY(CheckPointer("queries", args.queries, 4));
  PREFIXD_TRY(CheckPointer("row_offsets", args.row_offsets, 4));
  PREFIXD_TRY(CheckPointer("anchor_counts", args.anchor_counts, 4));
  PREFIXD_TRY(CheckPointer("summaries", args.summaries, alignof(DeviceSummary)));
  PREFIXD_TRY(CheckPointer("y", args.y, 4));
  PREFIXD_TRY(CheckPointer("lse", args.lse, 4));
  PREFIXD_TRY(CheckPointer("rho_z", args.rho_z, 4));
  PREFIXD_TRY(CheckPointer("errors", args.errors, 4));
  PREFIXD_TRY(CheckPointer("workspace", args.workspace, 16));
  if (args.cuts) PREFIXD_TRY(CheckPointer("cuts", args.cuts, alignof(Cut)));
  if (args.features) PREFIXD_TRY(CheckPointer("features", args.features, alignof(void*)));
  if (args.feature_chunk) PREFIXD_TRY(CheckPointer("feature_chunk", args.feature_chunk, 4));
  if (plan.shape.max_clusters > 0) {
    PREFIXD_TRY(CheckPointer("row_clusters", args.row_clusters, alignof(uint16_t)));
  }
  const size_t element = DTypeBytes(plan.shape.row.dtype);
  if (args.row_addresses) {
    PREFIXD_TRY(CheckPointer("row_addresses", args.row_addresses, alignof(DeviceRow)));
  } else if (plan.shape.max_rows > 0) {
    PREFIXD_TRY(CheckPointer("rows", args.rows, element));
    if (args.row_stride < plan.shape.row.bytes() || args.row_stride % element != 0) {
      return InvalidArgument("gpu step: row_stride is " + std::to_string(args.row_stride) +
                             " bytes; it must be a multiple of " + std::to_string(element) +
                             " and at least " + std::to_string(plan.shape.row.bytes()));
    }
  }
  return internal::CheckWorkspace(args.workspace_bytes, plan.workspace_bytes);
}

}  // namespace

Result<StepPlan> PlanStep(const StepShape& shape, const DeviceInfo& device) {
  PREFIXD_TRY(CheckRange("group size", shape.group, 1, kMaxGroup));
  PREFIXD_TRY(CheckRange("n_groups", shape.n_groups, 1, (1u << 24) / shape.group));
  PREFIXD_TRY(CheckRange("key_dim", shape.row.key_dim, 1, kMaxDim));
  PREFIXD_TRY(CheckRange("value_dim", shape.row.value_dim, 1, kMaxDim));
  PREFIXD_TRY(CheckRange("max_rows", shape.max_rows, 0, kMaxRows));
  PREFIXD_TRY(CheckRange("d_phi", shape.d_phi, 0, kMaxDim));
  PREFIXD_TRY(CheckRange("d_emb", shape.d_emb, 0, kMaxEmbedding));
  PREFIXD_TRY(CheckRange("max_clusters", shape.max_clusters, 0, kMaxClusters));
  if ((shape.d_phi == 0) != (shape.d_emb == 0)) {
    return InvalidArgument("gpu step: d_phi and d_emb must both be given, or neither");
  }
  PREFIXD_TRY(internal::CheckDType(shape.row.dtype));
  StepPlan plan;
  plan.shape = shape;
  plan.n_splits = ChooseSplits(shape, device.multiprocessors);
  plan.workspace_bytes = internal::StepLayout(shape, plan.n_splits).total_floats() * sizeof(float);
  plan.shared_bytes = internal::SplitShared(shape).total * sizeof(float);
  plan.shared_limit = device.shared_bytes_max;
  if (plan.shared_bytes > plan.shared_limit) {
    return InvalidArgument("gpu step: this shape needs " + std::to_string(plan.shared_bytes) +
                           " bytes of shared memory; " + device.name + " gives a block " +
                           std::to_string(plan.shared_limit));
  }
  return plan;
}

Status LaunchStep(const StepPlan& plan, const BatchStepArgs& args, Stream stream) {
  PREFIXD_TRY(CheckArgs(plan, args));
  const internal::StepParams params{plan.shape, plan.n_splits, args};
  const size_t error_bytes = plan.shape.n_groups * sizeof(uint32_t);
  PREFIXD_TRY(CudaStatus(cudaMemsetAsync(args.errors, 0xff, error_bytes, stream),
                         "clearing the error words"));
  PREFIXD_TRY(CudaStatus(cudaError_t(internal::LaunchQueryKernel(params, stream)),
                         "launching the query kernel"));
  PREFIXD_TRY(CudaStatus(cudaError_t(internal::LaunchSplitKernel(params, plan, stream)),
                         "launching the split kernel"));
  PREFIXD_TRY(CudaStatus(cudaError_t(internal::LaunchClusterKernel(params, stream)),
                         "launching the cluster kernel"));
  return CudaStatus(cudaError_t(internal::LaunchMergeKernel(params, stream)),
                    "launching the merge kernel");
}

Status GroupError(uint32_t word, uint32_t anchors) {
  if (word == kGroupOk) return {};
  const uint32_t detail = word & ((1u << internal::kFaultShift) - 1);
  switch (static_cast<internal::GroupFault>(word >> internal::kFaultShift)) {
    case internal::GroupFault::kShape:
      return InvalidArgument(
          "row counts do not fit: more rows than the shape allows, more anchors than rows, or more "
          "retrieved rows than the mid region has");
    case internal::GroupFault::kSummary:
      return InvalidArgument(
          "the estimator lacks its summary or feature maps, their dimensions "
          "disagree with the shape, or the layer has a softcap");
    case internal::GroupFault::kQuery:
      return InvalidArgument("query head " + std::to_string(detail) + " holds NaN or infinity");
    case internal::GroupFault::kAddress:
      return InvalidArgument("the address of row " + std::to_string(detail) +
                             " or of its stored features is null or not aligned to an element");
    case internal::GroupFault::kCluster:
      return InvalidArgument("row " + std::to_string(detail) +
                             " is said to be of a cluster that the summary does not have");
    case internal::GroupFault::kRow: {
      const uint32_t row = detail / 2;
      const bool anchor = row < anchors;
      return InvalidArgument(std::string(anchor ? "anchor" : "retrieved") + " row " +
                             std::to_string(anchor ? row : row - anchors) + ": its " +
                             (detail % 2 ? "value" : "key") + " holds NaN or infinity");
    }
    case internal::GroupFault::kOverflow:
      return InvalidArgument(
          "the result of query head " + std::to_string(detail) +
          " is not finite: finite inputs overflowed, or a summary is not finite");
  }
  return Error{Code::kInternal, "gpu step: unknown error word " + std::to_string(word)};
}

}  // namespace prefixd::gpu
