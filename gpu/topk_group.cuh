// What the kernels of a Top-K share. Internal to gpu/.
#pragma once

#include "gpu/tile.cuh"
#include "gpu/topk_layout.h"

namespace prefixd::gpu::internal {

// A group's number of keys and of those wanted; nothing where they are beyond the shape.
struct TopKGroup {
  uint32_t count = 0, k = 0;
  bool fits = false, aligned = false;
};
__device__ inline TopKGroup GroupOf(const TopKParams& p, uint32_t group) {
  const TopKSource& source = p.args.sources[group];
  const void* data = p.shape.codes ? source.codes : source.keys;
  const uintptr_t unit = p.shape.codes ? 4 : ElementBytes(p.shape.dtype);
  TopKGroup out;
  out.aligned = reinterpret_cast<uintptr_t>(data) % unit == 0 &&
                (p.shape.codes || source.key_stride % unit == 0);
  out.fits = out.aligned && source.count <= p.shape.max_keys &&
             min(source.k, source.count) <= p.shape.max_k &&
             (source.count == 0 || (data && (!p.shape.codes || source.book)));
  if (out.fits) {
    out.count = source.count;
    out.k = min(source.k, source.count);
  }
  return out;
}

// Says what is wrong with a group that does not fit. One thread.
__device__ inline void ReportGroup(const TopKParams& p, uint32_t group, const TopKGroup& of) {
  if (of.fits) return;
  Fault(p.args.errors, group, of.aligned ? GroupFault::kShape : GroupFault::kAddress, 0);
}

__device__ inline uint32_t* Workspace(const TopKParams& p) {
  return static_cast<uint32_t*>(p.args.workspace);
}

// log sum exp over parts that are each (max, sum exp(x - max)).
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

// Order of float32 as unsigned integers; no number maps to 0 or to all ones.
__device__ inline uint32_t OrderedBits(float x) {
  const uint32_t bits = __float_as_uint(x);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ inline float FromOrderedBits(uint32_t ordered) {
  return __uint_as_float(ordered & 0x80000000u ? ordered & 0x7fffffffu : ~ordered);
}

}  // namespace prefixd::gpu::internal
