// Lays out the data that the kernels of a step pass to one another. Internal to gpu/.
//
// Workspace, in floats: one HeadState per (group, query head), one Partial per (group, split), and
// where clusters are in use one Cluster per (group, cluster) and the kept rows of each group.
#pragma once

#include <cstddef>
#include <cstdint>

#include "gpu/device/block_layout.h"
#include "prefixd/gpu/step.h"
#include "prefixd/host_device.h"

namespace prefixd::gpu::internal {

struct StepLayout {
  uint32_t n_groups, group, key_dim, value_dim, d_phi, max_clusters, max_rows, n_splits;

  PREFIXD_HD StepLayout(const StepShape& s, uint32_t splits)
      : n_groups(s.n_groups),
        group(s.group),
        key_dim(s.row.key_dim),
        value_dim(s.row.value_dim),
        d_phi(s.d_phi),
        max_clusters(s.max_clusters),
        max_rows(s.max_rows),
        n_splits(splits) {}

  // HeadState: a head's estimator before any row is read.
  //   [0] phi: the shift of all its exponentials; moment: mu_M, the mean score of M
  //   [1] phi: P0 = sum_f p[f] u[f]; moment: scale^2 q^T Cov q, as a sum, with a covariance
  //   p [d_phi]           phi: exp(log phi_q[f] + m[f] - shift)
  //   constant [value_dim] phi: sum_f p[f] T[f,:]; moment: scale * q^T C
  //   mean [max_clusters] the mean score of each cluster
  PREFIXD_HD size_t head_floats() const { return 2 + size_t{d_phi} + value_dim + max_clusters; }
  PREFIXD_HD size_t head_at(uint32_t g, uint32_t h) const {
    return (size_t{g} * group + h) * head_floats();
  }
  PREFIXD_HD size_t p_at() const { return 2; }
  PREFIXD_HD size_t constant_at() const { return 2 + size_t{d_phi}; }
  PREFIXD_HD size_t mean_at() const { return constant_at() + value_dim; }

  // Partial: one split's sums. b_i is the second weight of row i, 0 for anchors: z~_i for phi,
  // s_i - mu_M for moment; vc the value centre, 0 for phi, the mean value of M for moment.
  //   m, z, b0, b2 [G]   max score, sum exp(s - m), sum b, sum b^2
  //   n, b1 [G][dv]      sum exp(s - m) v, sum b (v - vc)
  //   key1, key2 [dh]    where the summary has a mean key, over retrieved rows: sum (k - mean_key),
  //   sum (k - mean_key)^2
  //   value1 [dv]        over retrieved rows: sum (v - vc)
  //   feature [d_phi]    phi, per-feature form, over retrieved rows: sum exp(log phi_k - m)
  PREFIXD_HD size_t partial_floats() const {
    return 4 * size_t{group} + 2 * size_t{group} * value_dim + 2 * size_t{key_dim} + value_dim +
           d_phi;
  }
  PREFIXD_HD size_t partial_at(uint32_t g, uint32_t split) const {
    return size_t{n_groups} * group * head_floats() +
           (size_t{g} * n_splits + split) * partial_floats();
  }
  PREFIXD_HD size_t m_at() const { return 0; }
  PREFIXD_HD size_t z_at() const { return group; }
  PREFIXD_HD size_t b0_at() const { return 2 * size_t{group}; }
  PREFIXD_HD size_t b2_at() const { return 3 * size_t{group}; }
  PREFIXD_HD size_t n_at() const { return 4 * size_t{group}; }
  PREFIXD_HD size_t b1_at() const { return n_at() + size_t{group} * value_dim; }
  PREFIXD_HD size_t key1_at() const { return b1_at() + size_t{group} * value_dim; }
  PREFIXD_HD size_t key2_at() const { return key1_at() + key_dim; }
  PREFIXD_HD size_t value1_at() const { return key2_at() + key_dim; }
  PREFIXD_HD size_t feature_at() const { return value1_at() + value_dim; }

  // Cluster: what the retrieved rows leave of one cluster, over them:
  //   left               tokens that remain
  //   shift [key_dim]    sum (k - mean key)
  //   spread             spread of the remaining keys, over all channels
  //   value [value_dim]  sum v
  //   mass [G]           scan: sum exp(min(score, cut) - shift of the head)
  PREFIXD_HD size_t cluster_floats() const { return 2 + size_t{key_dim} + value_dim + group; }
  PREFIXD_HD size_t cluster_at(uint32_t g, uint32_t c) const {
    return partial_at(n_groups, 0) + (size_t{g} * max_clusters + c) * cluster_floats();
  }
  PREFIXD_HD size_t shift_at() const { return 1; }
  PREFIXD_HD size_t spread_at() const { return 1 + size_t{key_dim}; }
  PREFIXD_HD size_t cluster_value_at() const { return 2 + size_t{key_dim}; }
  PREFIXD_HD size_t mass_at() const { return cluster_value_at() + value_dim; }

  // Kept: the exact rows of groups that use clusters, decoded, key before value: each row crosses
  // the bus once, although another block sums its cluster.
  PREFIXD_HD size_t kept_at(uint32_t g, uint32_t row) const {
    return cluster_at(n_groups, 0) +
           (max_clusters > 0 ? (size_t{g} * max_rows + row) * (key_dim + value_dim) : 0);
  }

  PREFIXD_HD size_t total_floats() const { return kept_at(n_groups, 0); }
};

// Returns the 32-bit words of one row of activations in the tensor cores' form (phi_tile.cuh):
// pairs of bf16, padded so that the eight rows that a warp reads at once lie in different banks.
PREFIXD_HD constexpr size_t ActivationWords(uint32_t n) { return (size_t{n} + 15) / 16 * 8 + 4; }
// Returns the words of a tile's activations, high and low parts.
PREFIXD_HD constexpr size_t ActivationTile(uint32_t n) { return 2 * kTile * ActivationWords(n); }

// SplitShared describes dynamic shared memory of the split kernel, in floats from its start; each
// array is 16-byte aligned. Feature arrays are absent (size 0) when no group uses phi.
struct SplitShared {
  size_t q, raw, address, k, v, weight, second, rescale, mean_key, value_centre;  // always
  size_t p, m, feature, embed, first, next;                                       // phi
  size_t total;

  PREFIXD_HD explicit SplitShared(const StepShape& s) {
    const size_t dh = Pad4(s.row.key_dim), dv = Pad4(s.row.value_dim);
    const size_t df = Pad4(s.d_phi);
    size_t at = 0;
    q = at, at += 2 * s.group * dh;                   // [G][dh] float64
    raw = at, at += kTile * RawRow(s.row).bytes / 4;  // [kTile] rows in flight
    address = at, at += kTile * 4;                    // [kTile] DeviceRow of the next tile
    k = at, at += kTile * dh;                         // [kTile][dh]
    v = at, at += kTile * dv;                         // [kTile][dv]
    weight = at, at += kMaxGroup * kTile;             // [kMaxGroup][kTile] scores, then exp(s - m)
    second = at, at += kMaxGroup * kTile;             // [kMaxGroup][kTile] b
    rescale = at, at += kMaxGroup;                    // [kMaxGroup] exp(m_old - m_new)
    mean_key = at, at += dh;
    value_centre = at, at += dv;
    if (s.d_phi > 0) {
      p = at, at += s.group * df;  // [G][d_phi]
      m = at, at += df;            // [d_phi]
      // The array holds activations of layers 1 and 3, then, in their place, the features
      // [kTile][d_phi].
      const size_t of_keys = ActivationTile(s.row.key_dim), hidden = ActivationTile(s.d_emb);
      const size_t wide = of_keys > hidden ? of_keys : hidden;
      first = feature = at, at += wide > kTile * df ? wide : kTile * df;
      next = at, at += hidden;                  // activations of layers 2 and 4
      embed = at, at += kTile * Pad4(s.d_emb);  // [kTile][d_emb] g0, float32
    } else {
      p = m = first = feature = next = embed = at;
    }
    total = at;
  }
};

// QueryShared describes that of the query kernel, which works on one query.
struct QueryShared {
  size_t q, along, feature, embed, hidden, vector, total;

  PREFIXD_HD explicit QueryShared(const StepShape& s) {
    size_t at = 0;
    q = at, at += Pad4(s.row.key_dim);
    along = at, at += Pad4(s.row.key_dim);  // moment: q^T times C's factor, of a rank below key_dim
    feature = at, at += Pad4(s.d_phi);
    embed = at, at += Pad4(s.d_emb);
    hidden = at, at += Pad4(s.d_emb);
    vector = at, at += 4 * kThreads;  // MatrixVector's scratch (phi_query.cuh)
    total = at;
  }
};

// The kernels are declared in order. Each launch returns CUDA's result (cudaGetLastError).
struct StepParams {
  StepShape shape;
  uint32_t n_splits;
  BatchStepArgs args;
};
int LaunchQueryKernel(const StepParams& params, Stream stream);
int LaunchSplitKernel(const StepParams& params, const StepPlan& plan, Stream stream);
int LaunchClusterKernel(const StepParams& params, Stream stream);  // where clusters are in use
int LaunchMergeKernel(const StepParams& params, Stream stream);

}  // namespace prefixd::gpu::internal
