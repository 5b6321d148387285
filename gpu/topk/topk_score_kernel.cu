// Scans keys for a Top-K: every key of every group against its query heads. Scores go to the
// workspace, with each chunk's logsumexp.
#include <type_traits>

#include "gpu/topk/topk_group.cuh"

namespace prefixd::gpu::internal {
namespace {

// Heads are scored four at a time, so that their share of the queries stays in registers.
constexpr uint32_t kHeadsAtOnce = 4;
constexpr uint32_t kPrefetch = 4;   // keys that a lane has on their way
constexpr uint32_t kRunBytes = 16;  // bytes that a lane reads of a key at a time

// A lane's share of a key is eight elements, one run of 16-bit elements or two of float32 (kRun
// elements to a run), each run one 16-byte load; as many lanes as needed share a key.
constexpr uint32_t kShare = 8;
template <uint32_t kRun>
struct LaneShare {
  uint32_t dim, lanes = 1, within;  // elements of a key; lanes of a key; this lane

  __device__ explicit LaneShare(uint32_t key_dim) : dim(key_dim) {
    const uint32_t runs = (dim + kRun - 1) / kRun;
    while (lanes < runs && lanes < kWarp) lanes *= 2;
    within = threadIdx.x % lanes;
  }
  // Returns the element of the key that is the lane's e-th; dim or more: none.
  __device__ uint32_t At(uint32_t e) const { return (within + e / kRun * lanes) * kRun + e % kRun; }
};

// Reads eight elements of a key as float32, zeros beyond its end. whole: the key consists of
// aligned runs; a lane without a run of its own then reads the first one (its share of the queries
// is zeros), so that nothing stands between the loads of several keys.
template <uint32_t kRun>
__device__ void ReadShare(const LaneShare<kRun>& share, const std::byte* key, DType dtype,
                          bool whole, float (&x)[kShare]) {
#pragma unroll
  for (uint32_t run = 0; run < kShare; run += kRun) {
    const uint32_t at = share.At(run);
    if (whole) {
      const uint4 four =
          *reinterpret_cast<const uint4*>(key + (at < share.dim ? at : 0) * (kRunBytes / kRun));
      const uint32_t word[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (uint32_t j = 0; j < 4; ++j) {
        if constexpr (kRun == 4) {
          x[run + j] = __uint_as_float(word[j]);
        } else {
          const float2 pair = Unpack(dtype, word[j]);
          x[2 * j] = pair.x;
          x[2 * j + 1] = pair.y;
        }
      }
      continue;
    }
#pragma unroll
    for (uint32_t j = 0; j < kRun; ++j) {
      x[run + j] = at + j < share.dim ? Element(key, dtype, at + j) : 0.0f;
    }
  }
}

// A QueryShare is a lane's share of the queries of kHeadsAtOnce heads.
using QueryShare = float[kHeadsAtOnce][kShare];

// Computes the scores, before scaling, of keys [first, first + kThreads) that are below `end`, into
// score [kHeadsAtOnce][kThreads] in shared memory. A warp takes 32 keys in a row, several at a
// time, so that their loads are in flight together. Sums are float32.
template <uint32_t kRun, bool kWhole>
__device__ void ScoreBatch(const TopKParams& p, const TopKSource& source,
                           const LaneShare<kRun>& share, const QueryShare& query, uint32_t first,
                           uint32_t end, float* score) {
  constexpr uint32_t kSums = kPrefetch * kHeadsAtOnce;
  static_assert(kSums == 16);
  const uint32_t at_once = kWarp / share.lanes, lane = threadIdx.x % kWarp;
  const uint32_t warp_slot = threadIdx.x / kWarp * kWarp + lane / share.lanes;
  for (uint32_t j = 0; j < kWarp; j += kPrefetch * at_once) {
    float x[kPrefetch][kShare];
#pragma unroll
    for (uint32_t a = 0; a < kPrefetch; ++a) {
      // The last key again where there are no more: its score is not used.
      const uint32_t key = min(first + warp_slot + j + a * at_once, end - 1);
      ReadShare(share, static_cast<const std::byte*>(source.keys) + key * source.key_stride,
                p.shape.dtype, kWhole, x[a]);
    }
    float sum[kSums];
#pragma unroll
    for (uint32_t i = 0; i < kSums; ++i) {
      sum[i] = 0;
#pragma unroll
      for (uint32_t e = 0; e < kShare; ++e) {
        sum[i] = fmaf(query[i % kHeadsAtOnce][e], x[i / kHeadsAtOnce][e], sum[i]);
      }
    }
    // The lanes of a key add up: each exchange halves the sums that a lane still has to do with.
    uint32_t mine = 0;  // the first of them
    const auto halve = [&]<uint32_t kLeft>(std::integral_constant<uint32_t, kLeft>) {
      const uint32_t offset = share.lanes * kLeft / kSums;
      if (offset == 0) return;  // the same for the warp
      const bool upper = share.within & offset;
      if (upper) mine += kLeft;
#pragma unroll
      for (uint32_t i = 0; i < kLeft; ++i) {
        const float kept = upper ? sum[kLeft + i] : sum[i];
        const float given = upper ? sum[i] : sum[kLeft + i];
        sum[i] = kept + __shfl_xor_sync(kFullMask, given, static_cast<int>(offset));
      }
    };
    halve(std::integral_constant<uint32_t, 8>());
    halve(std::integral_constant<uint32_t, 4>());
    halve(std::integral_constant<uint32_t, 2>());
    halve(std::integral_constant<uint32_t, 1>());
    if (share.lanes == kWarp) sum[0] += __shfl_xor_sync(kFullMask, sum[0], 1);
#pragma unroll
    for (uint32_t i = 0; i < kSums; ++i) {
      const uint32_t a = (mine + i) / kHeadsAtOnce, h = (mine + i) % kHeadsAtOnce;
      const bool own = i == 0 || i * share.lanes < kSums;
      if (own && j + a * at_once < kWarp)
        score[h * kThreads + warp_slot + j + a * at_once] = sum[i];
    }
  }
}

// Grid: x = chunk, y = group. Heads are taken kHeadsAtOnce at a time; the keys of a chunk then come
// from the cache again.
template <uint32_t kRun>
__global__ void __launch_bounds__(kThreads, 2)
    KeyScoreKernel(const __grid_constant__ TopKParams p) {
  __shared__ float score[kHeadsAtOnce * kThreads];
  const uint32_t group = blockIdx.y, G = p.shape.group, dim = p.shape.key_dim;
  const TopKLayout layout(p.shape);
  const TopKGroup of = GroupOf(p, group);
  if (blockIdx.x == 0 && threadIdx.x == 0) ReportGroup(p, group, of);
  const auto [begin, end] = ChunkOf(of);
  if (begin >= end) return;  // the same for all threads of the block
  const TopKSource source = p.args.sources[group];
  const LaneShare<kRun> share(dim);
  const bool whole = dim % kRun == 0 && reinterpret_cast<uintptr_t>(source.keys) % kRunBytes == 0 &&
                     source.key_stride % kRunBytes == 0;
  for (uint32_t head0 = 0; head0 < G; head0 += kHeadsAtOnce) {
    QueryShare query;
#pragma unroll
    for (uint32_t h = 0; h < kHeadsAtOnce; ++h) {
#pragma unroll
      for (uint32_t e = 0; e < kShare; ++e) {
        const bool there = head0 + h < G && share.At(e) < dim;
        const size_t at = (size_t{group} * G + head0 + h) * dim + share.At(e);
        query[h][e] = there ? p.args.queries[at] : 0.0f;
        if (!Finite(query[h][e])) Fault(p.args.errors, group, GroupFault::kQuery, head0 + h);
      }
    }
    LogSum part[kHeadsAtOnce];
    for (uint32_t first = begin; first < end; first += kThreads) {
      __syncthreads();
      if (whole) {
        ScoreBatch<kRun, true>(p, source, share, query, first, end, score);
      } else {
        ScoreBatch<kRun, false>(p, source, share, query, first, end, score);
      }
      __syncthreads();
      const uint32_t i = first + threadIdx.x;
#pragma unroll
      for (uint32_t h = 0; h < kHeadsAtOnce; ++h) {
        if (i >= end || head0 + h >= G) continue;
        const float s =
            Capped(p.shape.layer.scale * score[h * kThreads + threadIdx.x], p.shape.layer.softcap);
        Workspace(p)[layout.score_at(group, head0 + h) + i] = __float_as_uint(s);
        if (Finite(s)) part[h].Add(s);
      }
    }
#pragma unroll
    for (uint32_t h = 0; h < kHeadsAtOnce; ++h) {
      if (head0 + h < G) StorePart(p, layout, head0 + h, part[h]);
    }
  }
}

}  // namespace

int LaunchScoreKernel(const TopKParams& params, Stream stream) {
  const dim3 grid(TopKLayout(params.shape).chunks, params.shape.n_groups);
  if (params.shape.codes) return LaunchCodeScoreKernel(params, stream);
  if (ElementBytes(params.shape.dtype) == 4) {
    return Launch(KeyScoreKernel<4>, grid, 0, 0, params, stream);
  }
  return Launch(KeyScoreKernel<8>, grid, 0, 0, params, stream);
}

}  // namespace prefixd::gpu::internal
