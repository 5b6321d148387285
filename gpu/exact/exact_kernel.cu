// Computes exact attention: a tile of queries against a run of rows on tensor cores, with a running
// softmax. While a tile of rows is computed, the next is on its way.
#include "gpu/exact/exact_stage.cuh"

namespace prefixd::gpu::internal {
namespace {

constexpr float kLog2E = 1.4426950408889634f;
constexpr double kLn2 = 0.69314718055994530942;
// Less than any score whose power of two is not 0 beside that of the largest float, and finite, so
// that differences of two are numbers.
constexpr float kNoScore = -3.402823466e38f;

// Adds to `sum` the products of 16 rows of A with kPairs pairs of neighbouring tiles of eight
// columns of B, over all parts with i + j <= kQueryParts - 1, small products first; the omitted
// products are below the last part's rounding.
template <uint32_t kParts, uint32_t kPairs>
__device__ void MmaParts(float (&sum)[kPairs][2][4], const uint32_t (&a)[kQueryParts][4],
                         const uint32_t (&b)[kPairs][kParts][4]) {
#pragma unroll
  for (int order = kQueryParts - 1; order >= 0; --order) {
#pragma unroll
    for (int j = 0; j < static_cast<int>(kParts); ++j) {
      const int i = order - j;
      if (i < 0) continue;
#pragma unroll
      for (uint32_t pair = 0; pair < kPairs; ++pair) {
        Mma(sum[pair][0], a[i], b[pair][j][0], b[pair][j][1]);
        Mma(sum[pair][1], a[i], b[pair][j][2], b[pair][j][3]);
      }
    }
  }
}

// A Worker is one warp's share of its block's tiles: 16 queries and kRows rows of each tile. A
// thread has two queries (lane / 4 and lane / 4 + 8) and two of every eight rows, later columns.
template <uint32_t kParts, uint32_t kColumns, uint32_t kQueryWarps, uint32_t kRows>
struct Worker {
  static constexpr ExactTile kShape{kQueryWarps, kRows};
  static constexpr uint32_t kColumnTiles = kColumns / 8;

  const ExactBlock& b;
  const uint32_t lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const uint32_t query_warp = warp % kQueryWarps, row_warp = warp / kQueryWarps;
  float m[2] = {kNoScore, kNoScore};
  float z[2] = {};  // over this thread's rows alone
  float n[kColumnTiles][4] = {};
  float lowest[2] = {};  // of all scores: -inf where one is; NaN and inf show in the sums

  __device__ uint32_t first_row() const { return row_warp * kRows; }
  // Returns the thread's query, of the tile.
  __device__ uint32_t query(uint32_t h) const { return query_warp * 16 + lane / 4 + 8 * h; }

  // Computes score[t] of rows 8 t .. 8 t + 7 of the warp's, before scaling.
  __device__ void Score(uint32_t stage, float (&score)[kRows / 8][4]) const {
    const uint32_t words = b.at.key_words;
    const uint32_t* q = b.shared + (query_warp * 16 + lane % 16) * words + lane / 16 * 4;
    const uint32_t* k =
        b.keys(stage) + (first_row() + lane / 16 * 8 + lane % 8) * words + lane / 8 % 2 * 4;
    for (uint32_t step = 0; step < (b.p.shape.row.key_dim + 15) / 16; ++step, q += 8, k += 8) {
      uint32_t a[kQueryParts][4];
#pragma unroll
      for (uint32_t part = 0; part < kQueryParts; ++part) {
        LoadMatrices(a[part], q + part * b.at.query_plane);
      }
      constexpr uint32_t kPairs = kRows >= 32 ? 2 : 1;
#pragma unroll
      for (uint32_t t = 0; t < kRows / 16; t += kPairs) {
        uint32_t key[kPairs][kParts][4];
#pragma unroll
        for (uint32_t i = 0; i < kPairs * kParts; ++i) {
          LoadMatrices(key[i / kParts][i % kParts],
                       k + i % kParts * b.at.key_plane + 16 * (t + i / kParts) * words);
        }
        float sum[kPairs][2][4] = {};  // a tensor core's own sum is cut off: it stays short
        MmaParts<kParts, kPairs>(sum, a, key);
#pragma unroll
        for (uint32_t i = 0; i < 8 * kPairs; ++i) {
          score[2 * t + i / 4][i % 4] += sum[i / 8][i / 4 % 2][i % 4];
        }
      }
    }
  }

  // Turns scores into exp(s - m) with the running maximum; rows from `valid` on have none. Scores
  // are in units of log 2 from here on: powers of two are the device's own. rescale: what the sums
  // so far are worth.
  __device__ void Softmax(uint32_t valid, float (&score)[kRows / 8][4], float (&rescale)[2]) {
    const LayerGeometry& layer = b.p.shape.layer;
    if (layer.softcap > 0) {
#pragma unroll
      for (uint32_t i = 0; i < kRows / 2; ++i) {
        float& s = score[i / 4][i % 4];
        if (!Finite(s)) lowest[i / 2 % 2] = -INFINITY;  // which the cap would hide
        s = kLog2E * layer.softcap * tanhf(layer.scale * s / layer.softcap);
      }
    } else {
#pragma unroll
      for (uint32_t i = 0; i < kRows / 2; ++i) score[i / 4][i % 4] *= layer.scale * kLog2E;
    }
    if (first_row() + kRows > valid) {  // the last tile; the same for the warp
#pragma unroll
      for (uint32_t i = 0; i < kRows / 2; ++i) {
        const uint32_t row = first_row() + i / 4 * 8 + 2 * (lane % 4) + i % 2;
        // No row, and no -inf that would be a fault: below all scores, and 0 as a weight.
        if (row >= valid) score[i / 4][i % 4] = kNoScore;
      }
    }
    float max[2] = {m[0], m[1]};
#pragma unroll
    for (uint32_t i = 0; i < kRows / 2; ++i) {
      max[i / 2 % 2] = fmaxf(max[i / 2 % 2], score[i / 4][i % 4]);
      lowest[i / 2 % 2] = fminf(lowest[i / 2 % 2], score[i / 4][i % 4]);
    }
#pragma unroll
    for (uint32_t h = 0; h < 2; ++h) {
      max[h] = fmaxf(max[h], __shfl_xor_sync(kFullMask, max[h], 1));
      max[h] = fmaxf(max[h], __shfl_xor_sync(kFullMask, max[h], 2));
      rescale[h] = exp2f(m[h] - max[h]);
      m[h] = max[h];
    }
    float mass[2] = {};  // of this tile: a sum of many small terms to a large one loses them
#pragma unroll
    for (uint32_t i = 0; i < kRows / 2; ++i) {
      float& s = score[i / 4][i % 4];
      s = exp2f(s - max[i / 2 % 2]);
      mass[i / 2 % 2] += s;
    }
    for (uint32_t h = 0; h < 2; ++h) z[h] = fmaf(z[h], rescale[h], mass[h]);
  }

  // Adds the tile of `valid` rows.
  __device__ void AddTile(uint32_t stage, uint32_t valid) {
    if (first_row() >= valid) return;  // the same for the warp
    float score[kRows / 8][4] = {}, rescale[2];
    Score(stage, score);
    Softmax(valid, score, rescale);
    // The weights of two tiles of eight rows already form a fragment of 16 columns.
    uint32_t weight[kRows / 16][kQueryParts][4];
#pragma unroll
    for (uint32_t t = 0; t < kRows / 16; ++t) {
#pragma unroll
      for (uint32_t w = 0; w < 4; ++w) {
        const float(&of)[4] = score[2 * t + w / 2];
        uint32_t parts[kQueryParts];
        SplitPair(of[2 * (w % 2)], of[2 * (w % 2) + 1], parts);
#pragma unroll
        for (uint32_t part = 0; part < kQueryParts; ++part) weight[t][part][w] = parts[part];
      }
    }
    const uint32_t words = b.at.value_words;
    const uint32_t* v =
        b.values(stage) + (first_row() + lane / 8 % 2 * 8 + lane % 8) * words + lane / 16 * 4;
    // Four tiles of columns at a time: as many sums, none of which waits for another.
#pragma unroll
    for (uint32_t c = 0; c < kColumnTiles; c += 4) {
      float sum[2][2][4] = {};
#pragma unroll
      for (uint32_t t = 0; t < kRows / 16; ++t) {
        uint32_t value[2][kParts][4];
#pragma unroll
        for (uint32_t part = 0; part < kParts; ++part) {
          const uint32_t* at = v + part * b.at.value_plane + 16 * t * words + 4 * c;
          LoadTransposed(value[0][part], at);
          LoadTransposed(value[1][part], at + 8);
        }
        MmaParts<kParts, 2>(sum, weight[t], value);
      }
#pragma unroll
      for (uint32_t i = 0; i < 16; ++i) {
        float& of = n[c + i / 4][i % 4];
        of = fmaf(of, rescale[i / 2 % 2], sum[i / 8][i / 4 % 2][i % 4]);
      }
    }
  }

  // Returns whether a score of the thread's query h is not finite.
  __device__ bool BadScore(uint32_t h) const {
    return !(lowest[h] >= kNoScore) || !Finite(m[h]) || !Finite(z[h]);
  }
  // Returns whether a score or a sum of this thread went wrong.
  __device__ bool WentWrong() const {
    bool wrong = BadScore(0) || BadScore(1);
#pragma unroll
    for (uint32_t c = 0; c < kColumnTiles; ++c) {
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) wrong |= !Finite(n[c][i]);
    }
    return wrong;
  }

  // Merges the states of the warps that share queries and stores the block's.
  __device__ void Store(const ExactLayout& layout, uint32_t split) {
    constexpr uint32_t kQueries = kShape.queries(), kRowWarps = kShape.row_warps();
    auto* state = reinterpret_cast<float*>(b.shared);  // [row warp][query]: max, then mass
    float* masses = state + kRowWarps * kQueries;
    float* sums = state + b.at.sums_at;
    __syncthreads();  // the last tile has been read
#pragma unroll
    for (uint32_t h = 0; h < 2; ++h) {
      z[h] += __shfl_xor_sync(kFullMask, z[h], 1);
      z[h] += __shfl_xor_sync(kFullMask, z[h], 2);
      if (lane % 4 != 0) continue;
      state[row_warp * kQueries + query(h)] = m[h];
      masses[row_warp * kQueries + query(h)] = z[h];
    }
    __syncthreads();
    float factor[2];
#pragma unroll
    for (uint32_t h = 0; h < 2; ++h) {
      float max = kNoScore;
      for (uint32_t w = 0; w < kRowWarps; ++w) max = fmaxf(max, state[w * kQueries + query(h)]);
      factor[h] = exp2f(m[h] - max);
    }
    for (uint32_t w = 0; w < kRowWarps; ++w) {
      if (w == row_warp) {
#pragma unroll
        for (uint32_t c = 0; c < kColumnTiles; ++c) {
#pragma unroll
          for (uint32_t i = 0; i < 4; ++i) {
            float& sum = sums[query(i / 2) * kColumns + 8 * c + 2 * (lane % 4) + i % 2];
            sum = (w > 0 ? sum : 0.0f) + factor[i / 2] * n[c][i];
          }
        }
      }
      __syncthreads();
    }
    float* parts = static_cast<float*>(b.p.args.workspace);
    for (uint32_t i = warp; i < kQueries && b.first_query + i < b.source.n_queries; i += kWarps) {
      float* out = parts + layout.part_at(b.group, b.first_query + i, split);
      if (lane == 0) {
        float max = kNoScore, mass = 0;
        for (uint32_t w = 0; w < kRowWarps; ++w) max = fmaxf(max, state[w * kQueries + i]);
        for (uint32_t w = 0; w < kRowWarps; ++w) {
          mass = fmaf(masses[w * kQueries + i], exp2f(state[w * kQueries + i] - max), mass);
        }
        out[0] = max;
        out[1] = mass;
      }
      for (uint32_t c = lane; c < layout.value_dim; c += kWarp) out[2 + c] = sums[i * kColumns + c];
    }
  }
};

// Grid: x = tile of queries and split, y = group.
template <uint32_t kParts, uint32_t kColumns, uint32_t kQueryWarps, uint32_t kRows>
__global__ void __launch_bounds__(kThreads, 1) ExactKernel(const __grid_constant__ ExactParams p) {
  using Work = Worker<kParts, kColumns, kQueryWarps, kRows>;
  constexpr uint32_t kTileRows = Work::kShape.rows();
  const uint32_t group = blockIdx.y, split = blockIdx.x % p.n_splits;
  const ExactSource source = p.args.sources[group];
  const ExactBlock b{p,
                     source,
                     ExactShared(p.shape.row, p.tile),
                     reinterpret_cast<uint32_t*>(DynamicShared()),
                     group,
                     blockIdx.x / p.n_splits * Work::kShape.queries()};
  if (source.n_queries > p.shape.max_queries || source.count > p.shape.max_rows) {
    if (threadIdx.x == 0) Fault(p.args.errors, group, GroupFault::kShape, 0);
    return;  // the same for all threads, here and below
  }
  if (b.first_query >= source.n_queries) return;
  const RowSplit range = SplitRows(source.count, p.n_splits, split, kTileRows);
  const auto rows_at = [&](uint32_t begin) { return min(kTileRows, range.end - begin); };
  const StageLane lane(b);
  const auto stage_rows = [&](uint32_t begin, uint32_t into) {
    StageRows<kParts, kTileRows>(b, lane, begin, rows_at(begin), into);
  };
  Work work{b};
  StageQueries(b);
  uint32_t stage = 0;
  if (range.begin < range.end) stage_rows(range.begin, stage);
  for (uint32_t begin = range.begin; begin < range.end; begin += kTileRows) {
    const uint32_t next = begin + kTileRows;
    WaitForCopies();
    __syncthreads();  // this tile is there, and the former has been read
    if (b.at.stages == 2 && next < range.end) stage_rows(next, stage ^ 1);
    work.AddTile(stage, rows_at(begin));
    if (b.at.stages == 2) {
      stage ^= 1;
    } else if (next < range.end) {
      __syncthreads();  // this tile has been read
      stage_rows(next, stage);
    }
  }
#pragma unroll
  for (uint32_t h = 0; h < 2; ++h) {
    // A maximum is that of four threads, of which one has the score.
    if (!work.BadScore(h)) continue;
    Fault(p.args.errors, group, GroupFault::kOverflow, b.first_query + work.query(h));
  }
  // In dynamic memory, because a kernel with static memory too could not have all of it.
  __syncthreads();  // the last tile has been read
  if (threadIdx.x == 0) *b.shared = 0;
  __syncthreads();
  if (work.WentWrong()) *b.shared = 1;
  __syncthreads();
  if (*b.shared != 0) ReportRows(b, range.begin, range.end);
  work.Store(ExactLayout(p.shape, p.n_splits), split);
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
  float m = kNoScore;
#pragma unroll 4
  for (uint32_t i = 0; i < p.n_splits; ++i) m = fmaxf(m, parts[i * layout.part_floats()]);
  double z = 0, n = 0;
#pragma unroll 4
  for (uint32_t i = 0; i < p.n_splits; ++i) {
    const float* part = parts + i * layout.part_floats();
    const double weight = exp2f(part[0] - m);
    z += weight * part[1];
    if (c < dv) n += weight * part[2 + c];
  }
  const size_t at = size_t{group} * p.shape.max_queries + query;
  const float y = z > 0 ? static_cast<float>(n / z) : 0.0f;
  if (c < dv) p.args.y[at * dv + c] = y;
  if (c == 0) p.args.lse[at] = z > 0 ? static_cast<float>(double{m} * kLn2 + log(z)) : -INFINITY;
  if (!Finite(y)) Fault(p.args.errors, group, GroupFault::kOverflow, query);
}

template <uint32_t kParts, uint32_t kColumns>
int LaunchColumns(const ExactParams& params, const ExactPlan& plan, Stream stream) {
  const uint32_t query_tiles =
      (params.shape.max_queries + plan.tile_queries - 1) / plan.tile_queries;
  const dim3 grid(query_tiles * params.n_splits, params.shape.n_groups);
  const auto launch = [&](auto* kernel) {
    return Launch(kernel, grid, plan.shared_bytes, plan.shared_limit, params, stream);
  };
  if constexpr (kParts == 1 && kColumns <= 128) {
    if (params.tile.query_warps == 8) return launch(ExactKernel<kParts, kColumns, 8, 64>);
    if (params.tile.query_warps == 1) return launch(ExactKernel<kParts, kColumns, 1, 16>);
    if (params.tile.warp_rows == 32) return launch(ExactKernel<kParts, kColumns, 4, 32>);
  }
  return launch(ExactKernel<kParts, kColumns, 4, 16>);
}

template <uint32_t kParts>
int LaunchParts(const ExactParams& params, const ExactPlan& plan, Stream stream) {
  switch (ValueColumns(params.shape.row.value_dim)) {
    case 64:
      return LaunchColumns<kParts, 64>(params, plan, stream);
    case 128:
      return LaunchColumns<kParts, 128>(params, plan, stream);
    default:
      return LaunchColumns<kParts, 256>(params, plan, stream);
  }
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
