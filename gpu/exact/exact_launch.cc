// Checks arguments, plans and launches exact attention. Host arithmetic, no kernels.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <string>

#include "gpu/device/argument_checks.h"
#include "gpu/device/cuda_status.h"
#include "gpu/exact/exact_layout.h"
#include "prefixd/gpu/exact.h"

namespace prefixd::gpu {

using internal::CheckPointer;
using internal::CheckRange;
using internal::CudaStatus;

namespace {

using internal::ExactShared;
using internal::ExactTile;

// Returns the tile for a launch: the smallest that takes all queries of a group, or the largest, as
// far as shared memory allows.
ExactTile ChooseTile(const ExactShape& shape, size_t shared_limit) {
  const auto fits = [&](const ExactTile& tile) {
    return ExactShared(shape.row, tile).total * sizeof(uint32_t) <= shared_limit;
  };
  if (internal::RowParts(shape.row.dtype) > 1) return internal::kOneStage;
  // The kernels that are compiled (exact_kernel.cu).
  if (shape.row.value_dim <= 128) {
    if (shape.max_queries <= internal::kFewQueries.queries() && fits(internal::kFewQueries)) {
      return internal::kFewQueries;
    }
    if (shape.max_queries > internal::kSomeQueries.queries() && fits(internal::kManyQueries)) {
      return internal::kManyQueries;
    }
    if (fits(internal::kSomeQueries)) return internal::kSomeQueries;
  }
  return fits(internal::kLittleMemory) ? internal::kLittleMemory : internal::kOneStage;
}

// Returns into how many parts the rows are split for `blocks` tiles of queries: as few as keep all
// parts within 3% of the fewest rounds of one block on each multiprocessor. A part has at least
// four tiles of rows and costs something by itself, and memory of the caller's.
uint32_t ChooseSplits(uint32_t blocks, uint32_t tiles, int multiprocessors) {
  const auto at_once = static_cast<uint32_t>(std::max(multiprocessors, 1));
  const uint32_t most = std::clamp(tiles / 4, 1u, 2 * at_once);
  const auto cost = [&](uint32_t splits) {
    const auto rounds = double((uint64_t{blocks} * splits + at_once - 1) / at_once);
    return rounds * (1.0 / splits + 4.0 / std::max(tiles, 1u));
  };
  double least = cost(1);
  for (uint32_t splits = 2; splits <= most; ++splits) least = std::min(least, cost(splits));
  for (uint32_t splits = 1; splits < most; ++splits) {
    if (cost(splits) <= 1.03 * least) return splits;
  }
  return most;
}

}  // namespace

Result<ExactPlan> PlanExact(const ExactShape& shape, const DeviceInfo& device) {
  PREFIXD_TRY(CheckRange("n_groups", shape.n_groups, 1, 65535));  // CUDA's limit on a grid's y
  PREFIXD_TRY(CheckRange("key_dim", shape.row.key_dim, 1, kMaxDim));
  PREFIXD_TRY(CheckRange("value_dim", shape.row.value_dim, 1, kMaxDim));
  PREFIXD_TRY(CheckRange("max_queries", shape.max_queries, 1, kMaxExactQueries));
  PREFIXD_TRY(CheckRange("max_rows", shape.max_rows, 0, kMaxExactRows));
  PREFIXD_TRY(internal::CheckDType(shape.row.dtype));
  ExactPlan plan;
  plan.shape = shape;
  const ExactTile tile = ChooseTile(shape, device.shared_bytes_max);
  plan.tile_queries = tile.queries();
  plan.tile_rows = tile.rows();
  plan.reads_ahead = tile.stages == 2;
  const uint32_t blocks =
      shape.n_groups * ((shape.max_queries + tile.queries() - 1) / tile.queries());
  const uint32_t tiles = (shape.max_rows + tile.rows() - 1) / tile.rows();
  plan.n_splits = ChooseSplits(blocks, tiles, device.multiprocessors);
  plan.workspace_bytes = internal::ExactLayout(shape, plan.n_splits).total_floats() * sizeof(float);
  plan.shared_bytes = ExactShared(shape.row, tile).total * sizeof(uint32_t);
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
  const internal::ExactParams params{
      plan.shape, internal::TileOf(plan.tile_queries, plan.tile_rows, plan.reads_ahead),
      plan.n_splits, args};
  PREFIXD_TRY(
      CudaStatus(cudaMemsetAsync(args.errors, 0xff, plan.shape.n_groups * sizeof(uint32_t), stream),
                 "clearing the error words"));
  PREFIXD_TRY(CudaStatus(cudaError_t(internal::LaunchExactKernel(params, plan, stream)),
                         "launching the exact kernel"));
  return CudaStatus(cudaError_t(internal::LaunchExactMergeKernel(params, stream)),
                    "launching the merge of exact states");
}

}  // namespace prefixd::gpu
