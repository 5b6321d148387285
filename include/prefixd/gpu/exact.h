// Computes exact attention of a block of queries over a whole stored prefix on CUDA, in one
// streaming pass: the suffix of a prompt (a new question) against the stored rows. The contract is
// that of ExactAttention in attention/step/step.h: the same partial state (y, lse) as a step's, so
// that it merges like one.
//
// Queries of all tokens and heads that share a KV head are rows of one matrix, so that each row of
// the prefix is read once for up to 128 of them. Products run on tensor cores: numbers are split
// into bf16 parts (three of a float32, two of an fp16, one of a bf16), the parts' products are
// summed in float32 beside the tensor cores' own truncating sum, and the dropped rest is below
// 2^-24; so the error bound is that of the CPU's path,
//     |y - y64| <= (2e-6 + 4e-7 max|s|) * sum p|v|.
//
// The caller lays out device memory; a launch allocates nothing and waits for nothing, and may be
// captured in a graph. Thread-safety: that of prefixd/gpu/step.h.
#pragma once

#include <cstddef>
#include <cstdint>

#include "prefixd/gpu/device.h"
#include "prefixd/gpu/step.h"
#include "prefixd/kv_shape.h"
#include "prefixd/result.h"

namespace prefixd::gpu {

inline constexpr uint32_t kMaxExactRows = 1u << 26;
inline constexpr uint32_t kMaxExactQueries = 1u << 20;  // per group: tokens times G

// The input of one (session, KV head). Rows lie in device memory or pinned host memory.
struct ExactSource {
  const float* queries = nullptr;  // [n_queries][key_dim]
  uint32_t n_queries = 0;
  uint32_t count = 0;                        // rows
  const DeviceRow* row_addresses = nullptr;  // [count], or null: rows at a stride, value behind key
  const void* rows = nullptr;
  size_t row_stride = 0;  // bytes, a multiple of the element size
};

struct ExactShape {
  uint32_t n_groups = 0;
  RowShape row;
  LayerGeometry layer;
  uint32_t max_queries = 0, max_rows = 0;  // largest of any group
};
struct ExactPlan {
  ExactShape shape;
  uint32_t tile_queries = 0;   // queries that share a read of the rows
  uint32_t tile_rows = 0;      // rows that a block reads at a time
  bool reads_ahead = false;    // whether the next rows are on their way meanwhile
  uint32_t n_splits = 1;       // blocks that share the rows of one tile of queries
  size_t workspace_bytes = 0;  // device memory, 16-byte aligned, no initial contents needed
  size_t shared_bytes = 0, shared_limit = 0;
};
// kInvalidArgument: a size is outside the limits, or needs more shared memory than the device has.
Result<ExactPlan> PlanExact(const ExactShape& shape, const DeviceInfo& device);

// Outputs and inputs of a launch: device pointers.
struct ExactArgs {
  const ExactSource* sources = nullptr;  // [n_groups]
  float* y = nullptr;                    // [n_groups][max_queries][value_dim]
  float* lse = nullptr;                  // [n_groups][max_queries]; -inf (and y = 0) for no rows
  uint32_t* errors = nullptr;  // [n_groups]: kGroupOk or a word for GroupError(word, count)
  void* workspace = nullptr;
  size_t workspace_bytes = 0;
};
// Enqueues two kernels. Errors are those of LaunchStep.
Status LaunchExact(const ExactPlan& plan, const ExactArgs& args, Stream stream);

}  // namespace prefixd::gpu
