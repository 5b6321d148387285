// Defines what all kernels share: threads of a block, tiles of rows, fault words. Internal to gpu/.
#pragma once

#include <cstddef>
#include <cstdint>

#include "prefixd/gpu/step.h"
#include "prefixd/host_device.h"

namespace prefixd::gpu::internal {

inline constexpr uint32_t kThreads = 256;  // in every kernel
inline constexpr uint32_t kTile = 16;      // rows staged in shared memory at a time
static_assert(kTile * kMaxGroup == kThreads, "the softmax stage has one thread per (head, row)");
static_assert(kMaxDim <= kThreads, "one thread per column");

// The function repeats DTypeBytes of prefixd/kv_shape.h, which device code cannot call.
PREFIXD_HD constexpr uint32_t ElementBytes(DType dtype) { return dtype == DType::kF32 ? 4 : 2; }

PREFIXD_HD constexpr size_t Pad4(size_t n) { return (n + 3) / 4 * 4; }  // float4 alignment

// An error word has its class in the high bits, so that the earliest stage's error wins an
// atomicMin.
enum class GroupFault : uint32_t {
  kShape = 0,
  kSummary = 1,
  kQuery = 2,
  kAddress = 3,
  kCluster = 4,
  kRow = 5,
  kOverflow = 6
};
inline constexpr uint32_t kFaultShift = 28;
// detail: the query head; for kAddress and kCluster the row; for kRow 2 * row (+ 1 for its value).
PREFIXD_HD constexpr uint32_t FaultWord(GroupFault fault, uint32_t detail) {
  return (static_cast<uint32_t>(fault) << kFaultShift) | detail;
}

// A RowSplit is the rows [begin, end), of a group of `count` rows, that split `index` of `n_splits`
// reads: whole tiles of `tile` rows, as even as tiles allow; trailing splits of a short group are
// empty.
struct RowSplit {
  uint32_t begin = 0, end = 0;
};
PREFIXD_HD inline RowSplit SplitRows(uint32_t count, uint32_t n_splits, uint32_t index,
                                     uint32_t tile) {
  const uint32_t tiles = (count + tile - 1) / tile;
  const uint32_t rows = (tiles + n_splits - 1) / n_splits * tile;
  RowSplit split;
  split.begin = index * rows < count ? index * rows : count;
  split.end = split.begin + rows < count ? split.begin + rows : count;
  return split;
}

// RawRow describes a row as staged before it is decoded: key and value each from a 16-byte boundary
// on.
struct RawRow {
  uint32_t key_bytes, value_bytes, value_at, bytes;
  PREFIXD_HD explicit RawRow(const RowShape& row)
      : key_bytes(row.key_dim * ElementBytes(row.dtype)),
        value_bytes(row.value_dim * ElementBytes(row.dtype)),
        value_at((key_bytes + 15) / 16 * 16),
        bytes(value_at + (value_bytes + 15) / 16 * 16) {}
};

}  // namespace prefixd::gpu::internal
