// Lays out the data that the kernels of exact attention pass to one another. Internal to gpu/.
#pragma once

#include <cstddef>
#include <cstdint>

#include "gpu/step/step_layout.h"
#include "prefixd/gpu/exact.h"

namespace prefixd::gpu::internal {

inline constexpr uint32_t kQueryParts = 3;  // bf16 parts of a float32

// Returns the number of bf16 parts that hold an element exactly (float32: up to 2^-24).
PREFIXD_HD constexpr uint32_t RowParts(DType dtype) {
  return dtype == DType::kBf16 ? 1 : dtype == DType::kF16 ? 2 : 3;
}
// Returns the columns that kernels compute for values: the accumulators' size is known when they
// are compiled.
PREFIXD_HD constexpr uint32_t ValueColumns(uint32_t value_dim) {
  return value_dim <= 64 ? 64 : value_dim <= 128 ? 128 : 256;
}
// Returns the 32-bit words of one vector of n elements in pairs of bf16, padded so that the eight
// vectors that a warp reads at once lie in different banks.
PREFIXD_HD constexpr uint32_t PairWords(uint32_t n) { return (n + 15) / 16 * 8 + 4; }

// An ExactTile says how a block's warps share a tile: query_warps take 16 queries each, and as many
// times as there are more warps the tile's rows are divided, warp_rows to each. With two stages one
// tile of rows is on its way while another is computed.
struct ExactTile {
  uint32_t query_warps, warp_rows, stages = 2;

  PREFIXD_HD constexpr uint32_t row_warps() const { return kThreads / 32 / query_warps; }
  PREFIXD_HD constexpr uint32_t queries() const { return 16 * query_warps; }
  PREFIXD_HD constexpr uint32_t rows() const { return warp_rows * row_warps(); }
};
inline constexpr ExactTile kManyQueries{8, 64}, kSomeQueries{4, 32}, kFewQueries{1, 16};
// For wide rows, other types than bf16 (which are split into parts as they arrive), smaller
// devices.
inline constexpr ExactTile kLittleMemory{4, 16}, kOneStage{4, 16, 1};
// Returns the tile of so many queries and rows.
PREFIXD_HD constexpr ExactTile TileOf(uint32_t queries, uint32_t rows, bool ahead) {
  const uint32_t query_warps = queries / 16;
  return {query_warps, rows / (kThreads / 32 / query_warps), ahead ? 2u : 1u};
}

// ExactLayout describes the workspace, in floats: for each (group, query) the states of all splits:
// m, z, n [value_dim].
struct ExactLayout {
  uint32_t n_groups, max_queries, value_dim, n_splits;

  PREFIXD_HD ExactLayout(const ExactShape& s, uint32_t splits)
      : n_groups(s.n_groups),
        max_queries(s.max_queries),
        value_dim(s.row.value_dim),
        n_splits(splits) {}
  PREFIXD_HD size_t part_floats() const { return 2 + size_t{value_dim}; }
  PREFIXD_HD size_t part_at(uint32_t group, uint32_t query, uint32_t split) const {
    return ((size_t{group} * max_queries + query) * n_splits + split) * part_floats();
  }
  PREFIXD_HD size_t total_floats() const { return part_at(n_groups, 0, 0); }
};

// ExactShared describes dynamic shared memory in 32-bit words; each array is 16-byte aligned.
struct ExactShared {
  uint32_t key_words, value_words;   // of one vector
  uint32_t key_plane, value_plane;   // of a tile, one part
  uint32_t query_plane;              // of the queries, one part
  uint32_t stages, value_at, stage;  // values behind keys in a stage, and a stage's words
  uint32_t rows_at;                  // the first stage: queries [part][query][pair of dims] before
  // Once all rows are added: the states' maxima and masses, [row warp][query], then their sums
  // [query][columns] from `sums_at` on.
  uint32_t sums_at;
  size_t total;

  PREFIXD_HD ExactShared(const RowShape& row, ExactTile tile) {
    const uint32_t parts = RowParts(row.dtype);
    key_words = PairWords(row.key_dim);
    value_words = PairWords(ValueColumns(row.value_dim));
    key_plane = tile.rows() * key_words;
    value_plane = tile.rows() * value_words;
    query_plane = tile.queries() * key_words;
    stages = tile.stages;
    value_at = parts * key_plane;
    stage = value_at + parts * value_plane;
    rows_at = kQueryParts * query_plane;
    sums_at = 2 * tile.row_warps() * tile.queries();
    const size_t staged = rows_at + size_t{stages} * stage;
    const size_t merged = sums_at + size_t{tile.queries()} * ValueColumns(row.value_dim);
    total = staged > merged ? staged : merged;
  }
};

struct ExactParams {
  ExactShape shape;
  ExactTile tile;
  uint32_t n_splits;
  ExactArgs args;
};
int LaunchExactKernel(const ExactParams& params, const ExactPlan& plan, Stream stream);
int LaunchExactMergeKernel(const ExactParams& params, Stream stream);

}  // namespace prefixd::gpu::internal
