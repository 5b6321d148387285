// Lays out the data that the kernels of exact attention pass to one another. Internal to gpu/.
#pragma once

#include <cstddef>
#include <cstdint>

#include "gpu/step/step_layout.h"
#include "prefixd/gpu/exact.h"

namespace prefixd::gpu::internal {

inline constexpr uint32_t kQueryTile = 64;  // queries per block, 16 to a warp
inline constexpr uint32_t kExactRows = 32;  // rows staged at a time, 16 to a warp
inline constexpr uint32_t kHalves = 2;      // warps of a block that share queries
static_assert(kThreads == 32 * (kQueryTile / 16) * kHalves && kExactRows == 16 * kHalves);
inline constexpr uint32_t kQueryParts = 3;  // bf16 parts of a float32

// Returns the number of bf16 parts that hold an element exactly (float32: up to 2^-24).
PREFIXD_HD constexpr uint32_t RowParts(DType dtype) {
  return dtype == DType::kBf16 ? 1 : dtype == DType::kF16 ? 2 : 3;
}
// Returns the 32-bit words of one vector of n elements in pairs of bf16, padded so that the eight
// vectors that a warp reads at once lie in different banks.
PREFIXD_HD constexpr uint32_t PairWords(uint32_t n) { return (n + 15) / 16 * 8 + 4; }

// ExactLayout describes the workspace, in floats: for each (group, query) the states of all parts:
// m, z, n [value_dim].
struct ExactLayout {
  uint32_t n_groups, max_queries, value_dim, n_parts;

  PREFIXD_HD ExactLayout(const ExactShape& s, uint32_t n_splits)
      : n_groups(s.n_groups),
        max_queries(s.max_queries),
        value_dim(s.row.value_dim),
        n_parts(n_splits * kHalves) {}
  PREFIXD_HD size_t part_floats() const { return 2 + size_t{value_dim}; }
  PREFIXD_HD size_t part_at(uint32_t group, uint32_t query, uint32_t part) const {
    return ((size_t{group} * max_queries + query) * n_parts + part) * part_floats();
  }
  PREFIXD_HD size_t total_floats() const { return part_at(n_groups, 0, 0); }
};

// ExactShared describes dynamic shared memory in 32-bit words; each array is 16-byte aligned.
struct ExactShared {
  size_t q, k, v, total;
  PREFIXD_HD explicit ExactShared(const RowShape& row) {
    const size_t parts = RowParts(row.dtype);
    size_t at = 0;
    q = at, at += kQueryParts * kQueryTile * PairWords(row.key_dim);  // [part][query][pair of dims]
    k = at, at += parts * kExactRows * PairWords(row.key_dim);        // [part][row][pair of dims]
    const size_t columns = (row.value_dim + 7) / 8 * 8;
    v = at, at += parts * columns * PairWords(kExactRows);  // [part][column][pair of rows]
    total = at;
  }
};

struct ExactParams {
  ExactShape shape;
  uint32_t n_splits;
  ExactArgs args;
};
int LaunchExactKernel(const ExactParams& params, const ExactPlan& plan, Stream stream);
int LaunchExactMergeKernel(const ExactParams& params, Stream stream);

}  // namespace prefixd::gpu::internal
