// Selects Top-K exhaustively on CUDA: scores every key of each group, by the keys themselves or by
// their compact codes as stored (index/codes/block_codes.h), and returns the k best by the group's
// rule with a cut per query head (docs/mathematics.md; index/ranking/group_ranking.h has the CPU
// form).
//
// Like a step (prefixd/gpu/step.h), a launch works on device memory laid out by the caller; it
// allocates nothing, waits for nothing and reads nothing back, so that a CUDA graph can capture it.
// k and the number of keys are read on the device and may change between replays within the shape's
// limits.
//
//   scores -> logsumexp per head -> rank of each key -> radix selection -> ids ascending, cuts
//
// Among keys with the rank of the k-th the lowest ids win, so that the result is the same every
// time. A key that is not finite ranks first: the step then reads its row and refuses it by name.
//
// Thread-safety: that of prefixd/gpu/step.h.
#pragma once

#include <cstddef>
#include <cstdint>

#include "prefixd/gpu/device.h"
#include "prefixd/kv_shape.h"
#include "prefixd/result.h"
#include "prefixd/selection.h"

namespace prefixd::gpu {

inline constexpr uint32_t kMaxTopK = 16384;
inline constexpr uint32_t kMaxTopKKeys = 1u << 24;  // per group

// BlockCodeBook of index/codes/block_codes.h in device memory; its Validate has checked it.
struct DeviceCodeBook {
  uint32_t components = 0;
  const float* centre = nullptr;         // [key_dim]
  const uint8_t* digits = nullptr;       // [components]
  const uint8_t* mean_digits = nullptr;  // [components]
  const float* mean_ratios = nullptr;    // [components]
  const uint16_t* directions = nullptr;  // [components][key_dim], bf16
};

// BlockCodes of index/codes/block_codes.h in device memory, without the bounds that let blocks be
// skipped: all blocks are scored. A key's score is the mean's, as a whole number in units of the
// keys', plus its digits': the same whole numbers, to the bit, as BlockQueries' and CodeScan's.
struct DeviceBlockCodes {
  const DeviceCodeBook* book = nullptr;
  const void* blocks = nullptr;      // [CodeBlocks(stored)] blocks of codes, 4-byte aligned
  const void* means = nullptr;       // one block per window, 4-byte aligned
  const uint16_t* tokens = nullptr;  // [CodeBlocks(stored)][32]
  uint32_t stored = 0;               // keys, count or more
};

// The candidates of one group: keys skip .. count.
struct TopKSource {
  const void* keys = nullptr;  // at a stride, e.g. the rows themselves
  size_t key_stride = 0;       // bytes, a multiple of the element size
  DeviceBlockCodes codes;      // for searches by codes
  uint32_t count = 0;
  uint32_t skip = 0;      // up to count
  uint32_t first_id = 0;  // the token of key 0
  uint32_t k = 0;         // tokens to select; the group's count or more: all
};

struct TopKShape {
  uint32_t n_groups = 0;
  uint32_t group = 0;  // G, up to kMaxGroup
  uint32_t key_dim = 0;
  DType dtype = DType::kBf16;  // the keys' type
  LayerGeometry layer;
  bool codes = false;     // all groups by codes, or all by keys
  uint32_t max_keys = 0;  // any group's count
  uint32_t max_k = 0;
};

struct TopKPlan {
  TopKShape shape;
  size_t workspace_bytes = 0;  // device memory, 16-byte aligned, no initial contents needed
};
// kInvalidArgument: a size is outside the limits; the message names it.
Result<TopKPlan> PlanTopK(const TopKShape& shape);

// Inputs and outputs of a launch: device pointers.
struct TopKArgs {
  const float* queries = nullptr;       // [n_groups][G][key_dim]
  const TopKSource* sources = nullptr;  // [n_groups]
  uint32_t* ids = nullptr;              // [n_groups][max_k] tokens, ascending
  uint32_t* counts = nullptr;           // [n_groups] number of ids: min(k, count - skip)
  // [n_groups][G]: exact with keys, above every key left out by more than the scores' rounding;
  // approximate with codes. -inf where nothing was left out.
  Cut* cuts = nullptr;
  uint32_t* errors = nullptr;  // [n_groups]: kGroupOk or a word for GroupError (prefixd/gpu/step.h)
  void* workspace = nullptr;
  size_t workspace_bytes = 0;
};
// Enqueues the selection: seven kernels, eight by codes. Errors are those of LaunchStep.
Status LaunchTopK(const TopKPlan& plan, const TopKArgs& args, Stream stream);

}  // namespace prefixd::gpu
