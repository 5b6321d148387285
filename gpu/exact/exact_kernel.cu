// Computes exact attention: a tile of queries against a run of rows on tensor cores, with a running
// softmax.
#include "gpu/device/mma.cuh"
#include "gpu/device/tile.cuh"
#include "gpu/exact/exact_layout.h"

namespace prefixd::gpu::internal {
namespace {

// Computes c = the sum of A_i B_j over all parts with i + j <= kQueryParts - 1, small products
// first; the omitted products are below the last part's rounding.
template <uint32_t kParts>
__device__ void MmaParts(float (&c)[4], const uint32_t (&a)[kQueryParts][4],
                         const uint32_t (&b)[kParts][2]) {
  for (float& x : c) x = 0;
#pragma unroll
  for (int order = kQueryParts - 1; order >= 0; --order) {
#pragma unroll
    for (int j = 0; j < static_cast<int>(kParts); ++j) {
      const int i = order - j;
      if (i >= 0) Mma(c, a[i], b[j][0], b[j][1]);
    }
  }
}

struct ExactBlock {
  const ExactParams& p;
  const ExactSource& source;
  const ExactShared at;
  uint32_t* shared;
  uint32_t group, first_query;

  __device__ DeviceRow Row(uint32_t i) const {
    if (source.row_addresses) return source.row_addresses[i];
    const std::byte* row = static_cast<const std::byte*>(source.rows) + i * source.row_stride;
    return {row, row + size_t{p.shape.row.key_dim} * ElementBytes(p.shape.row.dtype)};
  }
};

__device__ void StageQueries(const ExactBlock& b) {
  const uint32_t dim = b.p.shape.row.key_dim, ld = PairWords(dim), pairs = (dim + 15) / 16 * 8;
  for (uint32_t i = threadIdx.x; i < kQueryTile * pairs; i += kThreads) {
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
      b.shared[b.at.q + (part * kQueryTile + query) * ld + pair] = parts[part];
    }
  }
}

// Stages rows [begin, begin + n) of the group, the rest of the tile as zeros: keys in pairs of
// dimensions, values in pairs of rows, the form in which the products take them.
template <uint32_t kParts>
__device__ void StageRows(const ExactBlock& b, uint32_t begin, uint32_t n) {
  const RowShape& shape = b.p.shape.row;
  const uint32_t dh = shape.key_dim, dv = shape.value_dim, element = ElementBytes(shape.dtype);
  const auto report = [&](float x, uint32_t detail) {
    if (!Finite(x)) Fault(b.p.args.errors, b.group, GroupFault::kRow, detail);
  };
  const auto usable = [&](const void* part) {
    return part && reinterpret_cast<uintptr_t>(part) % element == 0;
  };
  const auto put = [&](uint32_t* to, size_t stride, float x, float y) {
    uint32_t parts[kParts];
    SplitPair(x, y, parts);
#pragma unroll
    for (uint32_t part = 0; part < kParts; ++part) to[part * stride] = parts[part];
  };

  const uint32_t ldk = PairWords(dh), key_pairs = (dh + 15) / 16 * 8;
  const uint32_t lane = threadIdx.x % kWarp;
  for (uint32_t r = threadIdx.x / kWarp; r < kExactRows; r += kWarps) {
    const void* key = r < n ? b.Row(begin + r).key : nullptr;
    if (r < n && !usable(key)) {
      if (lane == 0) Fault(b.p.args.errors, b.group, GroupFault::kAddress, begin + r);
      key = nullptr;
    }
    for (uint32_t pair = lane; pair < key_pairs; pair += kWarp) {
      const float x = key && 2 * pair < dh ? Element(key, shape.dtype, 2 * pair) : 0.0f;
      const float y = key && 2 * pair + 1 < dh ? Element(key, shape.dtype, 2 * pair + 1) : 0.0f;
      report(x, 2 * (begin + r));
      report(y, 2 * (begin + r));
      put(b.shared + b.at.k + r * ldk + pair, size_t{kExactRows} * ldk, x, y);
    }
  }
  constexpr uint32_t kLdv = PairWords(kExactRows);
  const uint32_t columns = (dv + 7) / 8 * 8;
  for (uint32_t pair = threadIdx.x / kWarp; pair < kExactRows / 2; pair += kWarps) {
    const void* value[2];
    for (uint32_t e = 0; e < 2; ++e) {
      const uint32_t r = 2 * pair + e;
      value[e] = r < n ? b.Row(begin + r).value : nullptr;
      if (r < n && !usable(value[e])) {
        if (lane == 0) Fault(b.p.args.errors, b.group, GroupFault::kAddress, begin + r);
        value[e] = nullptr;
      }
    }
    for (uint32_t d = lane; d < columns; d += kWarp) {
      const float x = value[0] && d < dv ? Element(value[0], shape.dtype, d) : 0.0f;
      const float y = value[1] && d < dv ? Element(value[1], shape.dtype, d) : 0.0f;
      report(x, 2 * (begin + 2 * pair) + 1);
      report(y, 2 * (begin + 2 * pair + 1) + 1);
      put(b.shared + b.at.v + d * kLdv + pair, size_t{columns} * kLdv, x, y);
    }
  }
}

// An accumulator is a warp's share: 16 queries, and of each tile 16 rows. A thread has two queries
// (lane / 4 and lane / 4 + 8) and two of every eight columns.
template <uint32_t kColumnTiles>
struct Accumulator {
  float m[2] = {-INFINITY, -INFINITY};
  float z[2] = {};  // over this thread's rows alone
  float n[kColumnTiles][4] = {};
};

// Computes scores[t][i] of rows 8 t .. 8 t + 7 of the warp's 16, before scaling.
template <uint32_t kParts>
__device__ void ScoreTile(const ExactBlock& b, float (&score)[2][4]) {
  const uint32_t dim = b.p.shape.row.key_dim, ld = PairWords(dim);
  const uint32_t lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const uint32_t r = lane / 4, c = lane % 4;
  const uint32_t query = warp / kHalves * 16 + r, row = warp % kHalves * 16 + r;
  for (uint32_t k = 0; k < (dim + 15) / 16; ++k) {
    uint32_t q[kQueryParts][4];
#pragma unroll
    for (uint32_t part = 0; part < kQueryParts; ++part) {
      const uint32_t* at = b.shared + b.at.q + (part * kQueryTile + query) * ld + 8 * k + c;
      q[part][0] = at[0];
      q[part][1] = at[8 * ld];
      q[part][2] = at[4];
      q[part][3] = at[8 * ld + 4];
    }
#pragma unroll
    for (uint32_t t = 0; t < 2; ++t) {
      uint32_t key[kParts][2];
#pragma unroll
      for (uint32_t part = 0; part < kParts; ++part) {
        const uint32_t* at = b.shared + b.at.k + (part * kExactRows + row + 8 * t) * ld + 8 * k + c;
        key[part][0] = at[0];
        key[part][1] = at[4];
      }
      float sum[4];
      MmaParts<kParts>(sum, q, key);
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) score[t][i] += sum[i];
    }
  }
}

// Adds the tile of rows [begin, begin + n) to the accumulator.
template <uint32_t kParts, uint32_t kColumnTiles>
__device__ void AddTile(const ExactBlock& b, uint32_t n, Accumulator<kColumnTiles>& acc) {
  const LayerGeometry& layer = b.p.shape.layer;
  const uint32_t lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const uint32_t r = lane / 4, c = lane % 4, first_row = warp % kHalves * 16;
  float score[2][4] = {};
  ScoreTile<kParts>(b, score);

  float max[2] = {acc.m[0], acc.m[1]};
#pragma unroll
  for (uint32_t t = 0; t < 2; ++t) {
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      float s = layer.scale * score[t][i];
      if (layer.softcap > 0) s = layer.softcap * tanhf(s / layer.softcap);
      const bool valid = first_row + 8 * t + 2 * c + i % 2 < n;
      if (valid && !Finite(s)) {
        Fault(b.p.args.errors, b.group, GroupFault::kOverflow,
              b.first_query + warp / kHalves * 16 + r + 8 * (i / 2));
      }
      score[t][i] = valid ? s : -INFINITY;
      max[i / 2] = fmaxf(max[i / 2], score[t][i]);
    }
  }
  float rescale[2];
#pragma unroll
  for (uint32_t h = 0; h < 2; ++h) {
    max[h] = fmaxf(max[h], __shfl_xor_sync(kFullMask, max[h], 1));
    max[h] = fmaxf(max[h], __shfl_xor_sync(kFullMask, max[h], 2));
    rescale[h] = acc.m[h] == -INFINITY ? 0.0f : expf(acc.m[h] - max[h]);
    acc.m[h] = max[h];
    acc.z[h] *= rescale[h];
  }
#pragma unroll
  for (uint32_t t = 0; t < 2; ++t) {
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      score[t][i] = score[t][i] == -INFINITY ? 0.0f : expf(score[t][i] - max[i / 2]);
      acc.z[i / 2] += score[t][i];
    }
  }
  // The weights of two tiles of eight rows already form a fragment of 16 columns.
  uint32_t weight[kQueryParts][4];
#pragma unroll
  for (uint32_t w = 0; w < 4; ++w) {
    uint32_t parts[kQueryParts];
    SplitPair(score[w / 2][2 * (w % 2)], score[w / 2][2 * (w % 2) + 1], parts);
#pragma unroll
    for (uint32_t part = 0; part < kQueryParts; ++part) weight[part][w] = parts[part];
  }
  constexpr uint32_t kLdv = PairWords(kExactRows);
  const uint32_t tiles = (b.p.shape.row.value_dim + 7) / 8;
#pragma unroll
  for (uint32_t t = 0; t < kColumnTiles; ++t) {
    if (t >= tiles) break;
    uint32_t value[kParts][2];
#pragma unroll
    for (uint32_t part = 0; part < kParts; ++part) {
      const uint32_t* at =
          b.shared + b.at.v + (part * tiles * 8 + 8 * t + r) * kLdv + first_row / 2 + c;
      value[part][0] = at[0];
      value[part][1] = at[4];
    }
    float sum[4];
    MmaParts<kParts>(sum, weight, value);
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) acc.n[t][i] = fmaf(acc.n[t][i], rescale[i / 2], sum[i]);
  }
}

// Grid: x = tile of queries and split, y = group.
template <uint32_t kParts, uint32_t kColumnTiles>
__global__ void __launch_bounds__(kThreads) ExactKernel(const __grid_constant__ ExactParams p) {
  const uint32_t group = blockIdx.y, split = blockIdx.x % p.n_splits;
  const ExactSource& source = p.args.sources[group];
  const ExactBlock b{p,
                     source,
                     ExactShared(p.shape.row),
                     reinterpret_cast<uint32_t*>(DynamicShared()),
                     group,
                     blockIdx.x / p.n_splits * kQueryTile};
  if (source.n_queries > p.shape.max_queries || source.count > p.shape.max_rows) {
    if (threadIdx.x == 0) Fault(p.args.errors, group, GroupFault::kShape, 0);
    return;  // the same for all threads, here and below
  }
  if (b.first_query >= source.n_queries) return;
  const RowSplit range = SplitRows(source.count, p.n_splits, split, kExactRows);
  Accumulator<kColumnTiles> acc;
  StageQueries(b);
  for (uint32_t begin = range.begin; begin < range.end; begin += kExactRows) {
    const uint32_t n = min(kExactRows, range.end - begin);
    __syncthreads();  // the former tile has been read
    StageRows<kParts>(b, begin, n);
    __syncthreads();
    AddTile<kParts>(b, n, acc);
  }

  const uint32_t lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const ExactLayout layout(p.shape, p.n_splits);
#pragma unroll
  for (uint32_t h = 0; h < 2; ++h) {
    acc.z[h] += __shfl_xor_sync(kFullMask, acc.z[h], 1);
    acc.z[h] += __shfl_xor_sync(kFullMask, acc.z[h], 2);
    const uint32_t query = b.first_query + warp / kHalves * 16 + lane / 4 + 8 * h;
    if (query >= source.n_queries) continue;
    float* out = static_cast<float*>(p.args.workspace) +
                 layout.part_at(group, query, split * kHalves + warp % kHalves);
    if (lane % 4 == 0) {
      out[0] = acc.m[h];
      out[1] = acc.z[h];
    }
#pragma unroll
    for (uint32_t t = 0; t < kColumnTiles; ++t) {
#pragma unroll
      for (uint32_t e = 0; e < 2; ++e) {
        const uint32_t column = 8 * t + 2 * (lane % 4) + e;
        if (column < layout.value_dim) out[2 + column] = acc.n[t][2 * h + e];
      }
    }
  }
}

// Merges the parts of one query into one state. Grid: x = query, y = group.
__global__ void __launch_bounds__(kThreads)
    ExactMergeKernel(const __grid_constant__ ExactParams p) {
  const uint32_t group = blockIdx.y, query = blockIdx.x, c = threadIdx.x;
  const ExactSource& source = p.args.sources[group];
  const uint32_t dv = p.shape.row.value_dim;
  if (query >= min(source.n_queries, p.shape.max_queries)) return;
  if (p.args.errors[group] >> kFaultShift == static_cast<uint32_t>(GroupFault::kShape)) return;
  const ExactLayout layout(p.shape, p.n_splits);
  const float* parts =
      static_cast<const float*>(p.args.workspace) + layout.part_at(group, query, 0);
  float m = -INFINITY;
  for (uint32_t i = 0; i < layout.n_parts; ++i) m = fmaxf(m, parts[i * layout.part_floats()]);
  double z = 0, n = 0;
  for (uint32_t i = 0; i < layout.n_parts; ++i) {
    const float* part = parts + i * layout.part_floats();
    if (part[0] == -INFINITY) continue;
    const double weight = exp(double{part[0]} - m);
    z += weight * part[1];
    if (c < dv) n += weight * part[2 + c];
  }
  const size_t at = size_t{group} * p.shape.max_queries + query;
  const float y = z > 0 ? static_cast<float>(n / z) : 0.0f;
  if (c < dv) p.args.y[at * dv + c] = y;
  if (c == 0) p.args.lse[at] = z > 0 ? static_cast<float>(m + log(z)) : -INFINITY;
  if (!Finite(y)) Fault(p.args.errors, group, GroupFault::kOverflow, query);
}

template <uint32_t kParts>
int LaunchParts(const ExactParams& params, const ExactPlan& plan, Stream stream) {
  const uint32_t query_tiles = (params.shape.max_queries + kQueryTile - 1) / kQueryTile;
  const dim3 grid(query_tiles * params.n_splits, params.shape.n_groups);
  const auto launch = [&](auto* kernel) {
    return Launch(kernel, grid, plan.shared_bytes, plan.shared_limit, params, stream);
  };
  if (params.shape.row.value_dim <= 64) return launch(ExactKernel<kParts, 8>);
  if (params.shape.row.value_dim <= 128) return launch(ExactKernel<kParts, 16>);
  return launch(ExactKernel<kParts, 32>);
}

}  // namespace

int LaunchExactKernel(const ExactParams& params, const ExactPlan& plan, Stream stream) {
  switch (RowParts(params.shape.row.dtype)) {
    case 1:
      return LaunchParts<1>(params, plan, stream);
    case 2:
      return LaunchParts<2>(params, plan, stream);
    default:
      return LaunchParts<3>(params, plan, stream);
  }
}

int LaunchExactMergeKernel(const ExactParams& params, Stream stream) {
  const dim3 grid(params.shape.max_queries, params.shape.n_groups);
  return Launch(ExactMergeKernel, grid, 0, 0, params, stream);
}

}  // namespace prefixd::gpu::internal
