// Defines what the kernels of a Top-K share. Internal to gpu/.
#pragma once

#include "gpu/device/tile.cuh"
#include "gpu/topk/topk_layout.h"

namespace prefixd::gpu::internal {

// A TopKGroup is a group's candidates [first, end) and the number to select; none where they are
// beyond the shape.
struct TopKGroup {
  uint32_t first = 0, end = 0, k = 0;
  bool fits = false, aligned = false;
  __device__ uint32_t size() const { return end - first; }
};
__device__ inline bool IsAligned(const void* p, size_t unit) {
  return reinterpret_cast<uintptr_t>(p) % unit == 0;
}
__device__ inline TopKGroup GroupOf(const TopKParams& p, uint32_t group) {
  const TopKSource& source = p.args.sources[group];
  const DeviceBlockCodes& codes = source.codes;
  TopKGroup out;
  bool there;
  if (p.shape.codes) {
    out.aligned = IsAligned(codes.blocks, 4) && IsAligned(codes.means, 4) &&
                  IsAligned(codes.tokens, sizeof(uint16_t));
    there =
        codes.book && codes.blocks && codes.means && codes.tokens && source.count <= codes.stored;
  } else {
    const size_t unit = ElementBytes(p.shape.dtype);
    out.aligned = IsAligned(source.keys, unit) && source.key_stride % unit == 0;
    there = source.keys != nullptr;
  }
  if (source.skip > source.count) return out;
  const uint32_t n = source.count - source.skip, k = min(source.k, n);
  out.fits =
      out.aligned && source.count <= p.shape.max_keys && k <= p.shape.max_k && (n == 0 || there);
  if (out.fits) {
    out.first = source.skip;
    out.end = source.count;
    out.k = k;
  }
  return out;
}

// ChunkKeys are the candidates of this block's chunk; empty where begin >= end.
struct ChunkKeys {
  uint32_t begin, end;
};
__device__ inline ChunkKeys ChunkOf(const TopKGroup& of) {
  return {max(blockIdx.x * kChunk, of.first), min((blockIdx.x + 1) * kChunk, of.end)};
}

// Reports the fault of a group that does not fit. One thread calls it.
__device__ inline void ReportGroup(const TopKParams& p, uint32_t group, const TopKGroup& of) {
  if (of.fits) return;
  Fault(p.args.errors, group, of.aligned ? GroupFault::kShape : GroupFault::kAddress, 0);
}

__device__ inline uint32_t* Workspace(const TopKParams& p) {
  return static_cast<uint32_t*>(p.args.workspace);
}

__device__ inline float Capped(float score, float softcap) {
  return softcap > 0 ? softcap * tanhf(score / softcap) : score;
}
// Returns the score that a whole number stands for.
__device__ inline float CodeScore(const CodeNumbers& of, float softcap, int v) {
  return Capped(fmaf(of.mul, static_cast<float>(v), of.add), softcap);
}

// LogSum is the log sum exp over parts that are each (max, sum exp(x - max)).
struct LogSum {
  float max = -INFINITY;
  float sum = 0;

  __device__ void Add(float x) { Merge(x, 1.0f); }
  __device__ void Merge(float other_max, float other_sum) {
    if (other_max == -INFINITY) return;
    const float m = fmaxf(max, other_max);
    sum = (max == -INFINITY ? 0.0f : sum * expf(max - m)) + other_sum * expf(other_max - m);
    max = m;
  }
};

// Reduces each thread's part of one head's chunk and leaves it in the workspace.
__device__ inline void StorePart(const TopKParams& p, const TopKLayout& layout, uint32_t head,
                                 LogSum part) {
  const float max = BlockMax(part.max);
  const float sum = BlockSum(part.max == -INFINITY ? 0.0f : part.sum * expf(part.max - max));
  if (threadIdx.x != 0) return;
  uint32_t* out = Workspace(p) + layout.part_at(blockIdx.y, blockIdx.x, head);
  out[0] = __float_as_uint(max);
  out[1] = __float_as_uint(sum);
}

// Maps float32 to unsigned integers of the same order; no number maps to 0 or to all ones.
__device__ inline uint32_t OrderedBits(float x) {
  const uint32_t bits = __float_as_uint(x);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ inline float FromOrderedBits(uint32_t ordered) {
  return __uint_as_float(ordered & 0x80000000u ? ordered & 0x7fffffffu : ~ordered);
}

}  // namespace prefixd::gpu::internal
