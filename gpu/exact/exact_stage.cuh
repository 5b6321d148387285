// Brings queries and rows into shared memory, as the tensor cores take them: pairs of neighbouring
// elements in bf16 parts. Internal to gpu/; a part of the exact kernel.
#pragma once

#include "gpu/device/async_copy.cuh"
#include "gpu/device/mma.cuh"
#include "gpu/device/tile.cuh"
#include "gpu/exact/exact_layout.h"

namespace prefixd::gpu::internal {

struct ExactBlock {
  const ExactParams& p;
  const ExactSource source;  // in registers: copies in between would have it read again
  const ExactShared at;
  uint32_t* shared;
  uint32_t group, first_query;

  __device__ DeviceRow Row(uint32_t i) const {
    if (source.row_addresses) return source.row_addresses[i];
    const std::byte* row = static_cast<const std::byte*>(source.rows) + i * source.row_stride;
    return {row, row + size_t{p.shape.row.key_dim} * ElementBytes(p.shape.row.dtype)};
  }
  __device__ uint32_t* keys(uint32_t stage) const { return shared + at.rows_at + stage * at.stage; }
  __device__ uint32_t* values(uint32_t stage) const { return keys(stage) + at.value_at; }
};

__device__ inline void StageQueries(const ExactBlock& b) {
  const uint32_t dim = b.p.shape.row.key_dim, pairs = (dim + 15) / 16 * 8;
  for (uint32_t i = threadIdx.x; i < b.p.tile.queries() * pairs; i += kThreads) {
    const uint32_t query = i / pairs, pair = i % pairs;
    const uint32_t index = b.first_query + query;
    float x[2] = {};
    for (uint32_t e = 0; e < 2; ++e) {
      if (index < b.source.n_queries && 2 * pair + e < dim) {
        x[e] = b.source.queries[size_t{index} * dim + 2 * pair + e];
      }
      if (!Finite(x[e])) Fault(b.p.args.errors, b.group, GroupFault::kQuery, index);
    }
    uint32_t parts[kQueryParts];
    SplitPair(x[0], x[1], parts);
#pragma unroll
    for (uint32_t part = 0; part < kQueryParts; ++part) {
      b.shared[part * b.at.query_plane + query * b.at.key_words + pair] = parts[part];
    }
  }
}

inline constexpr uint32_t kUnit = 8;  // elements that a thread stages at a time

// Stages elements [first, first + kUnit) of a vector of `dim`, zeros beyond its end; part may be
// null: all zeros. Vectors of bf16 are copied while the thread goes on (WaitForCopies).
template <uint32_t kParts>
__device__ void StageUnit(uint32_t* to, uint32_t plane, const std::byte* part, uint32_t first,
                          uint32_t dim, DType dtype) {
  const bool whole = part && first + kUnit <= dim;
  if constexpr (kParts == 1) {
    const std::byte* from = part + size_t{first} * sizeof(uint16_t);
    if (whole && reinterpret_cast<uintptr_t>(from) % 16 == 0) {
      CopyAsync16(to, from);
      return;
    }
  }
#pragma unroll
  for (uint32_t pair = 0; pair < kUnit / 2; ++pair) {
    const uint32_t e = first + 2 * pair;
    const float x = whole || (part && e < dim) ? Element(part, dtype, e) : 0.0f;
    const float y = whole || (part && e + 1 < dim) ? Element(part, dtype, e + 1) : 0.0f;
    uint32_t parts[kParts];
    SplitPair(x, y, parts);
#pragma unroll
    for (uint32_t i = 0; i < kParts; ++i) to[i * plane + pair] = parts[i];
  }
}

// A StageLane is what a thread stages of every tile: one unit of every so many rows. Divided once,
// before the first tile.
struct StageLane {
  bool active, key, copies;   // copies: rows lie at a stride, with nothing to look up or to check
  uint32_t row, step;         // the thread's first row, and the distance of its rows
  uint32_t first, dim;        // element of the vector, and the vector's
  uint32_t to, words, plane;  // in shared memory: of row 0, of a row, of a part
  const std::byte* from;      // of row 0, where it copies
  size_t stride;

  __device__ explicit StageLane(const ExactBlock& b) {
    const RowShape& shape = b.p.shape.row;
    const uint32_t key_units = (shape.key_dim + 15) / 16 * 16 / kUnit;
    const uint32_t units = key_units + ValueColumns(shape.value_dim) / kUnit;
    const uint32_t unit = threadIdx.x % units;
    step = kThreads / units;
    row = threadIdx.x / units;
    active = row < step;
    key = unit < key_units;
    first = kUnit * (key ? unit : unit - key_units);
    dim = key ? shape.key_dim : shape.value_dim;
    words = key ? b.at.key_words : b.at.value_words;
    plane = key ? b.at.key_plane : b.at.value_plane;
    to = b.at.rows_at + (key ? 0 : b.at.value_at) + first / 2;
    stride = b.source.row_stride;
    from = static_cast<const std::byte*>(b.source.rows) +
           ((key ? 0 : shape.key_dim) + first) * sizeof(uint16_t);
    copies = shape.dtype == DType::kBf16 && b.source.rows && !b.source.row_addresses &&
             first + kUnit <= dim && reinterpret_cast<uintptr_t>(from) % 16 == 0 &&
             stride % 16 == 0;
  }
};

// Stages rows [begin, begin + n) of the group, the rest of the tile of kRows as zeros. A null or
// misaligned row would end the whole CUDA context, so it is refused and read as zeros.
template <uint32_t kParts, uint32_t kRows>
__device__ void StageRows(const ExactBlock& b, const StageLane& lane, uint32_t begin, uint32_t n,
                          uint32_t stage) {
  if (!lane.active) return;
  uint32_t* to = b.shared + lane.to + stage * b.at.stage;
  uint32_t r = lane.row;
  if (kParts == 1 && lane.copies) {
    const std::byte* from = lane.from + (begin + r) * lane.stride;
    const size_t distance = lane.step * lane.stride;
    uint32_t* at = to + r * lane.words;
#pragma unroll 4
    for (; r < n; r += lane.step, from += distance, at += lane.step * lane.words) {
      CopyAsync16(at, from);
    }
  }
  constexpr uint32_t kAhead = 4;  // rows whose addresses are looked up at a time
  const uint32_t element = ElementBytes(b.p.shape.row.dtype);
  for (; r < kRows; r += kAhead * lane.step) {
    DeviceRow rows[kAhead] = {};
#pragma unroll
    for (uint32_t a = 0; a < kAhead; ++a) {
      if (r + a * lane.step < n) rows[a] = b.Row(begin + r + a * lane.step);
    }
#pragma unroll
    for (uint32_t a = 0; a < kAhead; ++a) {
      const uint32_t at = r + a * lane.step;
      if (at >= kRows) break;
      const auto* part = static_cast<const std::byte*>(lane.key ? rows[a].key : rows[a].value);
      if (at < n && (!part || reinterpret_cast<uintptr_t>(part) % element != 0)) {
        Fault(b.p.args.errors, b.group, GroupFault::kAddress, begin + at);
        part = nullptr;
      }
      StageUnit<kParts>(to + at * lane.words, lane.plane, part, lane.first, lane.dim,
                        b.p.shape.row.dtype);
    }
  }
}

// Reports rows of [begin, end) that hold NaN or infinity. Only looked for where a sum went wrong.
__device__ inline void ReportRows(const ExactBlock& b, uint32_t begin, uint32_t end) {
  const RowShape& shape = b.p.shape.row;
  const uint32_t lane = threadIdx.x % kWarp, element = ElementBytes(shape.dtype);
  for (uint32_t i = begin + threadIdx.x / kWarp; i < end; i += kWarps) {
    const DeviceRow row = b.Row(i);
    for (uint32_t half = 0; half < 2; ++half) {
      const void* part = half == 0 ? row.key : row.value;
      if (!part || reinterpret_cast<uintptr_t>(part) % element != 0) continue;
      for (uint32_t e = lane; e < (half == 0 ? shape.key_dim : shape.value_dim); e += kWarp) {
        if (Finite(Element(part, shape.dtype, e))) continue;
        Fault(b.p.args.errors, b.group, GroupFault::kRow, 2 * i + half);
      }
    }
  }
}

}  // namespace prefixd::gpu::internal
