// Scans codes in blocks (index/codes/block_codes.h) for a Top-K: it quantises queries for them and
// computes every key's whole-number score, in the order of tokens.
#include "gpu/device/mma.cuh"
#include "gpu/topk/topk_group.cuh"
#include "index/codes/code_weights.h"

namespace prefixd::gpu::internal {
namespace {

constexpr uint32_t kMostFields =
    (kMaxDim + kCodeGroupFields - 1) / kCodeGroupFields * kCodeGroupFields;
static_assert(kMostFields <= kThreads, "one thread per field and per component");

// Quantised is the result of QuantiseQueries for one head.
struct Quantised {
  double mul;
  int middle;
};

// Computes the weights [fields] of components, one component a thread: `along` is its share of the
// score, `digits` its digits, none where there is no component. reserved: the largest other term
// added to a score.
__device__ Quantised Quantise(float along, uint32_t digits, double reserved, float scale,
                              uint32_t fields, int8_t* weights) {
  const double sign = scale < 0 ? -1 : 1;
  const double largest = BlockMax(HighestWeight(along, digits));
  const double total = 2 * reserved + BlockSum(ReachOfCodes(along, digits));
  const double unit = CodeUnit(largest, total, fields);
  const uint32_t first = SumBefore(digits);
  if (threadIdx.x < fields) weights[threadIdx.x] = 0;
  __syncthreads();
  int sum = 0;
  for (uint32_t j = 0; j < digits && first + j < fields; ++j) {
    const int weight = CodeWeight(along, j, sign, unit);
    weights[first + j] = static_cast<int8_t>(weight);
    sum += weight;
  }
  const int all = static_cast<int>(BlockSum(static_cast<double>(sum)));  // the sum is exact
  return {sign * scale * unit, MiddleOfCodes(all)};
}

__device__ uint32_t FourWeights(const int8_t* weights, uint32_t word) {
  uint32_t out = 0;
  for (uint32_t b = 0; b < 4; ++b) out |= uint32_t{uint8_t(weights[4 * word + b])} << 8 * b;
  return out;
}

// Quantises a head's query for the codes (PrepareBlockQueries). Grid: one block per (group, head).
__global__ void __launch_bounds__(kThreads) CodeQueryKernel(const __grid_constant__ TopKParams p) {
  __shared__ float along[kMostFields];
  __shared__ int8_t weights[kMostFields], mean_weights[kMostFields];
  const uint32_t group = blockIdx.x / p.shape.group, head = blockIdx.x % p.shape.group;
  const uint32_t dim = p.shape.key_dim, lane = threadIdx.x % kWarp;
  const TopKLayout layout(p.shape);
  const TopKGroup of = GroupOf(p, group);
  if (!of.fits || of.size() == 0) return;  // the same for all threads, here and below
  const DeviceCodeBook& book = *p.args.sources[group].codes.book;
  const float* query = p.args.queries + size_t{blockIdx.x} * dim;
  if (book.components > dim) {
    if (threadIdx.x == 0) Fault(p.args.errors, group, GroupFault::kSummary, head);
    return;
  }
  double centre = 0;
  for (uint32_t j = threadIdx.x; j < dim; j += kThreads) {
    if (!Finite(query[j])) Fault(p.args.errors, group, GroupFault::kQuery, head);
    centre += double{query[j]} * book.centre[j];
  }
  centre = BlockSum(centre);
  for (uint32_t c = threadIdx.x / kWarp; c < book.components; c += kWarps) {
    double sum = 0;
    for (uint32_t j = lane; j < dim; j += kWarp) {
      sum += double{query[j]} * LowBf16(book.directions[size_t{c} * dim + j]);
    }
    sum = WarpSum(sum);
    if (lane == 0) along[c] = static_cast<float>(sum);
  }
  __syncthreads();
  const bool mine = threadIdx.x < book.components;
  const float own = mine ? along[threadIdx.x] : 0.0f;
  const float of_mean = mine ? own * book.mean_ratios[threadIdx.x] : 0.0f;
  const uint32_t digits = mine ? min(uint32_t{book.digits[threadIdx.x]}, kMaxCodeDigits) : 0;
  const uint32_t mean_digits =
      mine ? min(uint32_t{book.mean_digits[threadIdx.x]}, kMaxCodeDigits) : 0;
  const float scale = p.shape.layer.scale;
  const Quantised means = Quantise(of_mean, mean_digits, 0, scale, layout.fields, mean_weights);
  const float mean_mul = static_cast<float>(means.mul);
  const int reach = threadIdx.x < layout.fields ? ReachOfWeight(mean_weights[threadIdx.x]) : 0;
  const double most = 2 + BlockSum(static_cast<double>(reach));
  const double reserved = scale != 0 ? most * mean_mul / fabs(double{scale}) : 0;
  const Quantised keys = Quantise(own, digits, reserved, scale, layout.fields, weights);
  const uint32_t words = layout.fields / 4;
  if (threadIdx.x < words) {
    Workspace(p)[layout.weight_at(group, head) + threadIdx.x] = FourWeights(weights, threadIdx.x);
    Workspace(p)[layout.mean_weight_at(group, head) + threadIdx.x] =
        FourWeights(mean_weights, threadIdx.x);
  }
  if (threadIdx.x != 0) return;
  CodeNumbers out;
  out.bias = -keys.middle;
  out.mean_bias = -means.middle;
  out.mul = static_cast<float>(keys.mul);
  out.units_of_mean = out.mul > 0 ? static_cast<float>(mean_mul / double{out.mul}) : 0.0f;
  // The middle of keys' codes stands for no difference from the mean.
  out.add = static_cast<float>(scale * centre + static_cast<float>(means.mul * means.middle) +
                               static_cast<float>(keys.mul * keys.middle));
  if (!Finite(out.mul) || !Finite(mean_mul) || !Finite(out.add)) {
    Fault(p.args.errors, group, GroupFault::kOverflow, head);
  }
  *reinterpret_cast<CodeNumbers*>(Workspace(p) + layout.code_at(group, head)) = out;
}

// Returns sum + the weighted digits of 16 fields, `weight` having four words of them.
__device__ int AddFields(uint32_t fields, const uint32_t* weight, int sum) {
#pragma unroll
  for (uint32_t plane = 0; plane < 4; ++plane) {
    const int digits = static_cast<int>(fields >> (2 * plane) & 0x03030303u);
    sum = __dp4a(digits, static_cast<int>(weight[plane]), sum);
  }
  return sum;
}

// Returns group f of the fields of the code at `place`.
__device__ uint32_t FieldsAt(const void* codes, uint32_t groups, uint32_t place, uint32_t f) {
  const size_t block = size_t{place / kCodeBlockKeys} * groups + f;
  return static_cast<const uint32_t*>(codes)[block * kCodeBlockKeys + place % kCodeBlockKeys];
}

constexpr uint32_t kLoads = 8;  // groups of fields that a thread has on their way

// Grid: x = chunk, y = group. One thread per key: the 32 keys of a code block are a warp, whose
// loads of a group of fields are 128 neighbouring bytes.
__global__ void __launch_bounds__(kThreads) CodeScoreKernel(const __grid_constant__ TopKParams p) {
  __shared__ uint32_t weight[kMaxGroup * (kMostFields / 4)];
  __shared__ uint32_t mean_weight[kMaxGroup * (kMostFields / 4)];
  __shared__ CodeNumbers of_head[kMaxGroup];
  __shared__ int bias[kMaxGroup * kChunkBlocks];  // each block's score of its mean
  const uint32_t group = blockIdx.y, G = p.shape.group;
  const TopKLayout layout(p.shape);
  const TopKGroup of = GroupOf(p, group);
  if (blockIdx.x == 0 && threadIdx.x == 0) ReportGroup(p, group, of);
  const ChunkKeys chunk = ChunkOf(of);
  if (chunk.begin >= chunk.end) return;

  const uint32_t words = layout.fields / 4, groups = layout.fields / kCodeGroupFields;
  for (uint32_t w = threadIdx.x; w < G * words; w += kThreads) {
    weight[w] = Workspace(p)[layout.weight_at(group, 0) + w];
    mean_weight[w] = Workspace(p)[layout.mean_weight_at(group, 0) + w];
  }
  if (threadIdx.x < G) {
    of_head[threadIdx.x] =
        *reinterpret_cast<const CodeNumbers*>(Workspace(p) + layout.code_at(group, threadIdx.x));
  }
  __syncthreads();
  const DeviceBlockCodes codes = p.args.sources[group].codes;
  const uint32_t blocks = (codes.stored + kCodeBlockKeys - 1) / kCodeBlockKeys;
  const uint32_t first_block = blockIdx.x * kChunkBlocks;
  const uint32_t end_block = min(first_block + kChunkBlocks, blocks);
  for (uint32_t i = threadIdx.x; i < G * kChunkBlocks; i += kThreads) {
    const uint32_t block = first_block + i % kChunkBlocks, h = i / kChunkBlocks;
    if (block >= end_block) continue;
    int mean = of_head[h].mean_bias;
    for (uint32_t f = 0; f < groups; ++f) {
      mean =
          AddFields(FieldsAt(codes.means, groups, block, f), &mean_weight[h * words + 4 * f], mean);
    }
    bias[i] = of_head[h].bias + InUnitsOfKeys(of_head[h].units_of_mean, mean);
  }
  __syncthreads();
  LogSum part[kMaxGroup];
  for (uint32_t place = first_block * kCodeBlockKeys + threadIdx.x;
       place < end_block * kCodeBlockKeys; place += kThreads) {
    const uint32_t token = codes.tokens[place];
    const uint32_t key = place / kWindowKeys * kWindowKeys + token;
    if (token >= kWindowKeys || key < chunk.begin || key >= chunk.end) continue;
    const uint32_t block = place / kCodeBlockKeys - first_block;
    int sum[kMaxGroup];
#pragma unroll
    for (uint32_t h = 0; h < kMaxGroup; ++h) sum[h] = h < G ? bias[h * kChunkBlocks + block] : 0;
    for (uint32_t f0 = 0; f0 < groups; f0 += kLoads) {
      uint32_t fields[kLoads];
#pragma unroll
      for (uint32_t i = 0; i < kLoads; ++i) {
        fields[i] = FieldsAt(codes.blocks, groups, place, min(f0 + i, groups - 1));
      }
#pragma unroll
      for (uint32_t h = 0; h < kMaxGroup; ++h) {
        if (h >= G) break;
#pragma unroll
        for (uint32_t i = 0; i < kLoads; ++i) {
          if (f0 + i >= groups) break;
          sum[h] = AddFields(fields[i], &weight[h * words + 4 * (f0 + i)], sum[h]);
        }
      }
    }
#pragma unroll
    for (uint32_t h = 0; h < kMaxGroup; ++h) {
      if (h >= G) break;
      reinterpret_cast<int16_t*>(Workspace(p) + layout.score_at(group, h))[key] =
          static_cast<int16_t>(sum[h]);
      const float s = CodeScore(of_head[h], p.shape.layer.softcap, sum[h]);
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

int LaunchCodeScoreKernel(const TopKParams& params, Stream stream) {
  const dim3 grid(TopKLayout(params.shape).chunks, params.shape.n_groups);
  return Launch(CodeScoreKernel, grid, 0, 0, params, stream);
}

}  // namespace prefixd::gpu::internal
