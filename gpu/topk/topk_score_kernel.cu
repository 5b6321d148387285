// Scans keys for a Top-K: every key of every group against its query heads. Scores go to the
// workspace, with each chunk's logsumexp.
#include "gpu/topk/topk_group.cuh"

namespace prefixd::gpu::internal {
namespace {

// Heads are scored four at a time, so that their share of the queries stays in registers.
constexpr uint32_t kHeadsAtOnce = 4;
constexpr uint32_t kRunBytes = 16;  // bytes that a lane reads of a key at a time

// A lane's share of a key is eight elements, one run of 16-bit elements or two of float32, each run
// one 16-byte load; as many lanes as needed share a key.
constexpr uint32_t kShare = 8;
struct LaneShare {
  uint32_t dim, run, lanes, within;  // elements of a key and of a run; lanes of a key; this lane

  __device__ LaneShare(uint32_t key_dim, DType dtype)
      : dim(key_dim), run(kRunBytes / ElementBytes(dtype)), lanes(1) {
    const uint32_t runs = (dim + run - 1) / run;
    while (lanes < runs && lanes < kWarp) lanes *= 2;
    within = threadIdx.x % kWarp % lanes;
  }
  // Returns the element of the key that is the lane's e-th; dim or more: none.
  __device__ uint32_t At(uint32_t e) const { return (within + e / run * lanes) * run + e % run; }
};

// Reads eight elements of a key as float32, zeros beyond its end.
__device__ void ReadShare(const LaneShare& share, const std::byte* key, DType dtype, bool wide,
                          float (&x)[kShare]) {
  const uint32_t element = ElementBytes(dtype);
#pragma unroll
  for (uint32_t half = 0; half < 2; ++half) {
    const uint32_t at = share.At(4 * half);
    // True where this half begins a run: the first half of a longer run brings the second along.
    const bool first = half == 0 || share.run == 4;
    if (wide && share.At(4 * half / share.run * share.run) + share.run <= share.dim) {
      if (!first) continue;
      const uint4 four = *reinterpret_cast<const uint4*>(key + at * element);
      const uint32_t word[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (uint32_t j = 0; j < 4; ++j) {
        if (dtype == DType::kF32) {
          x[4 * half + j] = __uint_as_float(word[j]);
        } else if (half == 0) {
          const float2 pair = Unpack(dtype, word[j]);
          x[2 * j] = pair.x;
          x[2 * j + 1] = pair.y;
        }
      }
      continue;
    }
#pragma unroll
    for (uint32_t j = 0; j < 4; ++j) {
      x[4 * half + j] = at + j < share.dim ? Element(key, dtype, at + j) : 0.0f;
    }
  }
}

// A QueryShare is a lane's share of the queries of kHeadsAtOnce heads.
using QueryShare = float[kHeadsAtOnce][kShare];

// Computes the scores, before scaling, of keys [first, first + kThreads) that are below `end`, into
// score [kHeadsAtOnce][kThreads] in shared memory. A warp takes 32 keys in a row, several at a
// time, so that their loads are in flight together. Sums are float32.
__device__ void ScoreBatch(const TopKParams& p, const LaneShare& share, const QueryShare& query,
                           uint32_t first, uint32_t end, float* score) {
  constexpr uint32_t kPrefetch = 4;
  const TopKSource& source = p.args.sources[blockIdx.y];
  const bool wide = reinterpret_cast<uintptr_t>(source.keys) % kRunBytes == 0 &&
                    source.key_stride % kRunBytes == 0;
  const uint32_t at_once = kWarp / share.lanes, lane = threadIdx.x % kWarp;
  const uint32_t warp_slot = threadIdx.x / kWarp * kWarp + lane / share.lanes;
  for (uint32_t j = 0; j < kWarp; j += kPrefetch * at_once) {
    float x[kPrefetch][kShare];
#pragma unroll
    for (uint32_t a = 0; a < kPrefetch; ++a) {
      const uint32_t key = first + warp_slot + j + a * at_once;
      if (j + a * at_once < kWarp && key < end) {
        ReadShare(share, static_cast<const std::byte*>(source.keys) + key * source.key_stride,
                  p.shape.dtype, wide, x[a]);
      } else {
        for (float& e : x[a]) e = 0;
      }
    }
#pragma unroll
    for (uint32_t a = 0; a < kPrefetch; ++a) {
#pragma unroll
      for (uint32_t h = 0; h < kHeadsAtOnce; ++h) {
        float sum = 0;
#pragma unroll
        for (uint32_t e = 0; e < kShare; ++e) sum = fmaf(query[h][e], x[a][e], sum);
        for (uint32_t offset = share.lanes / 2; offset > 0; offset /= 2) {
          sum += __shfl_xor_sync(kFullMask, sum, static_cast<int>(offset));
        }
        if (share.within == 0 && j + a * at_once < kWarp) {
          score[h * kThreads + warp_slot + j + a * at_once] = sum;
        }
      }
    }
  }
}

// Grid: x = chunk, y = group. Heads are taken kHeadsAtOnce at a time; the keys of a chunk then come
// from the cache again.
__global__ void __launch_bounds__(kThreads) KeyScoreKernel(const __grid_constant__ TopKParams p) {
  __shared__ float score[kHeadsAtOnce * kThreads];
  const uint32_t group = blockIdx.y, G = p.shape.group, dim = p.shape.key_dim;
  const TopKLayout layout(p.shape);
  const TopKGroup of = GroupOf(p, group);
  if (blockIdx.x == 0 && threadIdx.x == 0) ReportGroup(p, group, of);
  const auto [begin, end] = ChunkOf(of);
  if (begin >= end) return;  // the same for all threads of the block
  const LaneShare share(dim, p.shape.dtype);
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
      ScoreBatch(p, share, query, first, end, score);
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
  return Launch(KeyScoreKernel, grid, 0, 0, params, stream);
}

}  // namespace prefixd::gpu::internal
