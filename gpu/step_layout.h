// Where the kernels of a step keep what they hand to one another. Internal to gpu/.
//
// Workspace, in floats: one HeadState per (group, query head), then one Partial per (group, split).
#pragma once

#include <cstddef>
#include <cstdint>

#include "gpu/host_device.h"
#include "gpu/step_gpu.h"

namespace prefixd::gpu::internal {

inline constexpr uint32_t kThreads = 256;  // of every kernel
inline constexpr uint32_t kTile = 16;      // rows staged in shared memory at a time
static_assert(kTile * kMaxGroup == kThreads, "the softmax stage has one thread per (head, row)");
static_assert(kMaxDim <= kThreads, "one thread per column");

// DTypeBytes of attention/kv_shape.h, which device code cannot call.
PREFIXD_HD constexpr uint32_t ElementBytes(DType dtype) { return dtype == DType::kF32 ? 4 : 2; }

PREFIXD_HD constexpr size_t Pad4(size_t n) { return (n + 3) / 4 * 4; }  // float4 alignment

// Error words: a class in the high bits, so that the earliest stage's error wins an atomicMin.
enum class GroupFault : uint32_t {
  kShape = 0,
  kSummary = 1,
  kQuery = 2,
  kAddress = 3,
  kRow = 4,
  kOverflow = 5
};
inline constexpr uint32_t kFaultShift = 28;
// detail: the query head; for kAddress the row; for kRow 2 * row (+ 1 for its value).
PREFIXD_HD constexpr uint32_t FaultWord(GroupFault fault, uint32_t detail) {
  return (static_cast<uint32_t>(fault) << kFaultShift) | detail;
}

// Rows [begin, end) of a group of `count` rows that split `index` of `n_splits` reads: whole tiles
// of `tile` rows, as even as tiles allow; trailing splits of a short group are empty.
struct RowSplit {
  uint32_t begin = 0, end = 0;
};
PREFIXD_HD inline RowSplit SplitRows(uint32_t count, uint32_t n_splits, uint32_t index,
                                     uint32_t tile) {
  const uint32_t tiles = (count + tile - 1) / tile;
  const uint32_t rows = (tiles + n_splits - 1) / n_splits * tile;
  RowSplit split;
  split.begin = index * rows < count ? index * rows : count;
  split.end = split.begin + rows < count ? split.begin + rows : count;
  return split;
}

struct StepLayout {
  uint32_t n_groups, group, key_dim, value_dim, d_phi, n_splits;

  PREFIXD_HD StepLayout(const StepShape& s, uint32_t splits)
      : n_groups(s.n_groups),
        group(s.group),
        key_dim(s.row.key_dim),
        value_dim(s.row.value_dim),
        d_phi(s.d_phi),
        n_splits(splits) {}

  // HeadState: what a head's estimator says before any row is read.
  //   [0] phi: the shift of all its exponentials; moment: mu_M, the mean score of M
  //   [1] phi: P0 = sum_f p[f] u[f]
  //   p [d_phi]           phi: exp(log phi_q[f] + m[f] - shift)
  //   constant [value_dim] phi: sum_f p[f] T[f,:]; moment: scale * sum_j q[j] cross[j,:]
  PREFIXD_HD size_t head_floats() const { return 2 + size_t{d_phi} + value_dim; }
  PREFIXD_HD size_t head_at(uint32_t g, uint32_t h) const {
    return (size_t{g} * group + h) * head_floats();
  }
  PREFIXD_HD size_t p_at() const { return 2; }
  PREFIXD_HD size_t constant_at() const { return 2 + size_t{d_phi}; }

  // Partial: one split's sums. b_i is the second weight of row i, 0 for anchors: z~_i for phi,
  // s_i - mu_M for moment; vc the value centre, 0 for phi, the mean value of M for moment.
  //   m, z, b0 [G]       max score, sum exp(s - m), sum b
  //   n, b1 [G][dv]      sum exp(s - m) v, sum b (v - vc)
  //   key1, key2 [dh]    where the summary has a mean key, over retrieved rows: sum (k - mean_key),
  //   sum (k - mean_key)^2 value1 [dv]        over retrieved rows: sum (v - vc)
  PREFIXD_HD size_t partial_floats() const {
    return 3 * size_t{group} + 2 * size_t{group} * value_dim + 2 * size_t{key_dim} + value_dim;
  }
  PREFIXD_HD size_t partial_at(uint32_t g, uint32_t split) const {
    return size_t{n_groups} * group * head_floats() +
           (size_t{g} * n_splits + split) * partial_floats();
  }
  PREFIXD_HD size_t m_at() const { return 0; }
  PREFIXD_HD size_t z_at() const { return group; }
  PREFIXD_HD size_t b0_at() const { return 2 * size_t{group}; }
  PREFIXD_HD size_t n_at() const { return 3 * size_t{group}; }
  PREFIXD_HD size_t b1_at() const { return n_at() + size_t{group} * value_dim; }
  PREFIXD_HD size_t key1_at() const { return b1_at() + size_t{group} * value_dim; }
  PREFIXD_HD size_t key2_at() const { return key1_at() + key_dim; }
  PREFIXD_HD size_t value1_at() const { return key2_at() + key_dim; }

  PREFIXD_HD size_t total_floats() const { return partial_at(n_groups, 0); }
};

// Dynamic shared memory of the split kernel, in floats from its start; each array is 16-byte
// aligned. Feature arrays are absent (size 0) when no group uses phi.
struct SplitShared {
  size_t q, k, v, weight, second, rescale, mean_key, value_centre;  // always
  size_t p, m, feature, embed, hidden;                              // phi
  size_t total;

  PREFIXD_HD explicit SplitShared(const StepShape& s) {
    const size_t dh = Pad4(s.row.key_dim), dv = Pad4(s.row.value_dim);
    const size_t df = Pad4(s.d_phi), de = Pad4(s.d_emb);
    size_t at = 0;
    q = at, at += s.group * dh;            // [G][dh]
    k = at, at += kTile * dh;              // [kTile][dh]
    v = at, at += kTile * dv;              // [kTile][dv]
    weight = at, at += kMaxGroup * kTile;  // [kMaxGroup][kTile] scores, then exp(s - m)
    second = at, at += kMaxGroup * kTile;  // [kMaxGroup][kTile] b
    rescale = at, at += kMaxGroup;         // [kMaxGroup] exp(m_old - m_new)
    mean_key = at, at += dh;
    value_centre = at, at += dv;
    p = at, at += s.group * df;      // [G][d_phi]
    m = at, at += df;                // [d_phi]
    feature = at, at += kTile * df;  // [kTile][d_phi]
    embed = at, at += kTile * de;    // [kTile][d_emb]
    hidden = at, at += kTile * de;   // [kTile][d_emb]
    total = at;
  }
};

// And of the query kernel, which works on one query.
struct QueryShared {
  size_t q, feature, embed, hidden, total;

  PREFIXD_HD explicit QueryShared(const StepShape& s) {
    size_t at = 0;
    q = at, at += Pad4(s.row.key_dim);
    feature = at, at += Pad4(s.d_phi);
    embed = at, at += Pad4(s.d_emb);
    hidden = at, at += Pad4(s.d_emb);
    total = at;
  }
};

// The kernels, in order. Each returns what CUDA says of its launch (cudaGetLastError).
struct StepParams {
  StepShape shape;
  uint32_t n_splits;
  BatchStepArgs args;
};
int LaunchQueryKernel(const StepParams& params, Stream stream);
int LaunchSplitKernel(const StepParams& params, const StepPlan& plan, Stream stream);
int LaunchMergeKernel(const StepParams& params, Stream stream);

}  // namespace prefixd::gpu::internal
