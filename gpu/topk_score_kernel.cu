// The scan of a Top-K: every key of every group against its query heads, by the keys or by their
// codes. Scores go to the workspace, with each chunk's logsumexp.
#include "gpu/mma.cuh"
#include "gpu/topk_group.cuh"

namespace prefixd::gpu::internal {
namespace {

constexpr uint32_t kHeadsAtOnce =
    4;  // scored at a time: their share of the queries stays in registers
constexpr uint32_t kRunBytes = 16;  // that a lane reads of a key at a time

// Reduces each thread's part of one head's chunk and leaves it in the workspace.
__device__ void StorePart(const TopKParams& p, const TopKLayout& layout, uint32_t head,
                          LogSum part) {
  const float max = BlockMax(part.max);
  const float sum = BlockSum(part.max == -INFINITY ? 0.0f : part.sum * expf(part.max - max));
  if (threadIdx.x != 0) return;
  uint32_t* out = Workspace(p) + layout.part_at(blockIdx.y, blockIdx.x, head);
  out[0] = __float_as_uint(max);
  out[1] = __float_as_uint(sum);
}

// A lane's share of a key: eight elements, one run of 16-bit elements or two of float32, each run
// one 16-byte load; as many lanes as it takes share a key.
constexpr uint32_t kShare = 8;
struct LaneShare {
  uint32_t dim, run, lanes, within;  // elements of a key and of a run; lanes of a key; this lane

  __device__ LaneShare(uint32_t key_dim, DType dtype)
      : dim(key_dim), run(kRunBytes / ElementBytes(dtype)), lanes(1) {
    const uint32_t runs = (dim + run - 1) / run;
    while (lanes < runs && lanes < kWarp) lanes *= 2;
    within = threadIdx.x % kWarp % lanes;
  }
  // The element of the key that is the lane's e-th; dim or more: none.
  __device__ uint32_t At(uint32_t e) const { return (within + e / run * lanes) * run + e % run; }
};

// Eight elements of a key as float32, zeros beyond its end.
__device__ void ReadShare(const LaneShare& share, const std::byte* key, DType dtype, bool wide,
                          float (&x)[kShare]) {
  const uint32_t element = ElementBytes(dtype);
#pragma unroll
  for (uint32_t half = 0; half < 2; ++half) {
    const uint32_t at = share.At(4 * half);
    const bool first = half == 0 || share.run == 4;  // of a run: the second half came with it
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

// A lane's share of the queries of kHeadsAtOnce heads.
using QueryShare = float[kHeadsAtOnce][kShare];

// Scores, before scaling, of keys [first, first + kThreads) that are below `end`, into score
// [kHeadsAtOnce][kThreads] in shared memory. A warp takes 32 keys in a row, several at a time, so
// that their loads are under way together. Sums are float32.
__device__ void ScoreBatch(const TopKParams& p, const LaneShare& share, const QueryShare& query,
                           uint32_t first, uint32_t end, float* score) {
  constexpr uint32_t kAhead = 4;
  const TopKSource& source = p.args.sources[blockIdx.y];
  const bool wide = reinterpret_cast<uintptr_t>(source.keys) % kRunBytes == 0 &&
                    source.key_stride % kRunBytes == 0;
  const uint32_t at_once = kWarp / share.lanes, lane = threadIdx.x % kWarp;
  const uint32_t warp_slot = threadIdx.x / kWarp * kWarp + lane / share.lanes;
  for (uint32_t j = 0; j < kWarp; j += kAhead * at_once) {
    float x[kAhead][kShare];
#pragma unroll
    for (uint32_t a = 0; a < kAhead; ++a) {
      const uint32_t key = first + warp_slot + j + a * at_once;
      if (j + a * at_once < kWarp && key < end) {
        ReadShare(share, static_cast<const std::byte*>(source.keys) + key * source.key_stride,
                  p.shape.dtype, wide, x[a]);
      } else {
        for (float& e : x[a]) e = 0;
      }
    }
#pragma unroll
    for (uint32_t a = 0; a < kAhead; ++a) {
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
  const uint32_t begin = blockIdx.x * kChunk, end = min(begin + kChunk, of.count);
  if (begin >= of.count) return;  // the same for all threads of the block
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
        float s = p.shape.layer.scale * score[h * kThreads + threadIdx.x];
        if (p.shape.layer.softcap > 0) {
          s = p.shape.layer.softcap * tanhf(s / p.shape.layer.softcap);
        }
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

// What a head's query becomes against codes (PrepareCodeQueries). Grid: one block per (group,
// head).
__global__ void __launch_bounds__(kThreads) CodeQueryKernel(const __grid_constant__ TopKParams p) {
  __shared__ float along[kMaxDim + kCodeGroupFields];
  __shared__ int8_t weights[kMaxDim + kCodeGroupFields];
  const uint32_t group = blockIdx.x / p.shape.group, head = blockIdx.x % p.shape.group;
  const uint32_t dim = p.shape.key_dim, lane = threadIdx.x % kWarp;
  const TopKLayout layout(p.shape);
  const TopKGroup of = GroupOf(p, group);
  if (!of.fits || of.count == 0) return;
  const DeviceCodeBook& book = *p.args.sources[group].book;
  const float* query = p.args.queries + size_t{blockIdx.x} * dim;
  if (book.components > layout.fields) {  // the same for all threads
    if (threadIdx.x == 0) Fault(p.args.errors, group, GroupFault::kSummary, head);
    return;
  }
  double centre = 0;
  for (uint32_t j = threadIdx.x; j < dim; j += kThreads) {
    if (!Finite(query[j])) Fault(p.args.errors, group, GroupFault::kQuery, head);
    centre += double{query[j]} * book.centre[j];
  }
  centre = BlockSum(centre);
  for (uint32_t i = threadIdx.x / kWarp; i < book.components; i += kWarps) {
    double sum = 0;
    for (uint32_t j = lane; j < dim; j += kWarp) {
      sum += double{query[j]} * LowBf16(book.directions[size_t{i} * dim + j]);
    }
    sum = WarpSum(sum);
    if (lane == 0) along[i] = static_cast<float>(sum);
  }
  for (uint32_t f = threadIdx.x; f < layout.fields; f += kThreads) weights[f] = 0;
  __syncthreads();
  uint32_t* out = Workspace(p) + layout.code_at(group, head);
  if (threadIdx.x == 0) {  // a few hundred steps, once per head
    double largest = 0, total = 0;
    for (uint32_t i = 0; i < book.components; ++i) {
      const double size = fabs(double{along[i]});
      largest = fmax(largest, size * double(1u << 2 * (book.digits[i] - 1)));
      total += size * double((1u << 2 * book.digits[i]) - 1);
    }
    const double room = 32767 - 1 - 0.75 * layout.fields;
    double unit = fmax(largest / 127, total / 2 / room);
    if (!(unit > 0) || !(unit < 1e300)) unit = 1;
    uint32_t field = 0;
    int sum = 0;
    for (uint32_t i = 0; i < book.components; ++i) {
      for (uint32_t j = 0; j < book.digits[i] && field < layout.fields; ++j, ++field) {
        const double weight = rint(along[i] * double(1u << 2 * j) / unit);
        weights[field] = static_cast<int8_t>(fmin(fmax(weight, -127.0), 127.0));
        sum += weights[field];
      }
    }
    const int middle = 3 * sum / 2;
    const double mul = p.shape.layer.scale * unit;
    out[0] = static_cast<uint32_t>(-middle);
    out[1] = __float_as_uint(static_cast<float>(mul));
    out[2] = __float_as_uint(static_cast<float>(p.shape.layer.scale * centre + mul * middle));
  }
  __syncthreads();
  uint32_t* packed = Workspace(p) + layout.weight_at(group, head);
  for (uint32_t w = threadIdx.x; w < layout.fields / 4; w += kThreads) {
    uint32_t word = 0;
    for (uint32_t b = 0; b < 4; ++b) word |= uint32_t(uint8_t(weights[4 * w + b])) << 8 * b;
    packed[w] = word;
  }
}

// Grid: x = chunk, y = group. One thread per key: the 32 keys of a code block are a warp, whose
// loads of a group of fields are 128 neighbouring bytes.
__global__ void __launch_bounds__(kThreads) CodeScoreKernel(const __grid_constant__ TopKParams p) {
  __shared__ uint32_t weight[kMaxGroup * (kMaxDim / 4)];
  __shared__ int bias[kMaxGroup];
  __shared__ float mul[kMaxGroup], add[kMaxGroup];
  const uint32_t group = blockIdx.y, G = p.shape.group;
  const TopKLayout layout(p.shape);
  const TopKGroup of = GroupOf(p, group);
  if (blockIdx.x == 0 && threadIdx.x == 0) ReportGroup(p, group, of);
  const uint32_t begin = blockIdx.x * kChunk, end = min(begin + kChunk, of.count);
  if (begin >= of.count) return;
  const uint32_t words = layout.fields / 4;  // of one head's weights
  for (uint32_t i = threadIdx.x; i < G * words; i += kThreads) {
    weight[i] = Workspace(p)[layout.weight_at(group, 0) + i];
  }
  if (threadIdx.x < G) {
    const uint32_t* code = Workspace(p) + layout.code_at(group, threadIdx.x);
    bias[threadIdx.x] = static_cast<int>(code[0]);
    mul[threadIdx.x] = __uint_as_float(code[1]);
    add[threadIdx.x] = __uint_as_float(code[2]);
  }
  __syncthreads();
  const uint32_t groups = layout.fields / kCodeGroupFields;
  const auto* codes = static_cast<const uint32_t*>(p.args.sources[group].codes);
  LogSum part[kMaxGroup];
  for (uint32_t i = begin + threadIdx.x; i < end; i += kThreads) {
    const uint32_t* block = codes + size_t{i / kCodeBlockKeys} * groups * kCodeBlockKeys;
    int sum[kMaxGroup] = {};
    for (uint32_t f = 0; f < groups; ++f) {
      const uint32_t word = block[f * kCodeBlockKeys + i % kCodeBlockKeys];
#pragma unroll
      for (uint32_t h = 0; h < kMaxGroup; ++h) {
        if (h >= G) break;
#pragma unroll
        for (uint32_t plane = 0; plane < 4; ++plane) {
          const int digits = static_cast<int>(word >> (2 * plane) & 0x03030303u);
          sum[h] = __dp4a(digits, static_cast<int>(weight[h * words + 4 * f + plane]), sum[h]);
        }
      }
    }
#pragma unroll
    for (uint32_t h = 0; h < kMaxGroup; ++h) {
      if (h >= G) break;
      const int v = sum[h] + bias[h];
      reinterpret_cast<int16_t*>(Workspace(p) + layout.score_at(group, h))[i] =
          static_cast<int16_t>(v);
      const float s = fmaf(mul[h], static_cast<float>(v), add[h]);
      if (Finite(s)) part[h].Add(s);
    }
  }
#pragma unroll
  for (uint32_t h = 0; h < kMaxGroup; ++h) {
    if (h < G) StorePart(p, layout, h, part[h]);
  }
}

}  // namespace

int LaunchCodeQueryKernel(const TopKParams& params, Stream stream) {
  return Launch(CodeQueryKernel, dim3(params.shape.n_groups * params.shape.group), 0, 0, params,
                stream);
}

int LaunchScoreKernel(const TopKParams& params, Stream stream) {
  const dim3 grid(TopKLayout(params.shape).chunks, params.shape.n_groups);
  if (params.shape.codes) return Launch(CodeScoreKernel, grid, 0, 0, params, stream);
  return Launch(KeyScoreKernel, grid, 0, 0, params, stream);
}

}  // namespace prefixd::gpu::internal
