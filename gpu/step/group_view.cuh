// Reads from device memory, and checks, what a block needs to know of its group. Internal to gpu/.
#pragma once

#include "gpu/device/tile.cuh"
#include "gpu/step/step_layout.h"

namespace prefixd::gpu::internal {

// GroupRows are the exact rows of a group: [0, anchors) are anchors, [anchors, count) retrieved.
struct GroupRows {
  size_t first = 0;  // index of row 0 among all groups' rows
  uint32_t count = 0, anchors = 0;
  bool fits = false;  // counts are within the shape that memory was laid out for
};

__device__ inline GroupRows RowsOf(const StepParams& p, uint32_t group) {
  GroupRows rows;
  const uint32_t begin = p.args.row_offsets[group], end = p.args.row_offsets[group + 1];
  rows.first = begin;
  rows.count = end - begin;  // wraps to a huge count when the offsets descend
  rows.anchors = p.args.anchor_counts[group];
  const DeviceSummary& summary = p.args.summaries[group];
  rows.fits =
      rows.count <= p.shape.max_rows && rows.anchors <= rows.count &&
      (summary.estimator == EstimatorKind::kNone || rows.count - rows.anchors <= summary.mid_count);
  return rows;
}

__device__ inline DeviceRow RowAddress(const StepParams& p, size_t index) {
  if (p.args.row_addresses) return p.args.row_addresses[index];
  const std::byte* row = static_cast<const std::byte*>(p.args.rows) + index * p.args.row_stride;
  return {row, row + RawRow(p.shape.row).key_bytes};
}

// Returns whether deviations from the mean key are summed: for the moments, and for phi where it
// bounds the mass.
__device__ inline bool HasMeanKey(const DeviceSummary& summary) {
  return summary.estimator != EstimatorKind::kNone && summary.mean_key != nullptr;
}

__device__ inline bool UsesClusters(EstimatorKind kind) {
  return kind == EstimatorKind::kCentroid || kind == EstimatorKind::kScan;
}

// Returns whether the shape made room for the map.
template <typename Map>
__device__ inline bool MapFits(const StepShape& shape, const Map& map) {
  return map.in_dim == shape.row.key_dim && map.d_phi == shape.d_phi && map.d_emb <= shape.d_emb;
}
__device__ inline const DeviceQueryMap& QueryMap(const DeviceSummary& s, uint32_t head) {
  return s.phi_q[s.phi_q_shared ? 0 : head];
}

__device__ inline bool PhiFits(const StepParams& p, const DeviceSummary& s, uint32_t head) {
  const bool codes = (s.feature_format.bits == 8 || s.feature_format.bits == 16) && s.feature_m &&
                     s.feature_chunks > 0 && p.args.features;
  return p.shape.d_phi > 0 && s.phi_m && s.phi_u && s.phi_t && s.phi_q &&
         MapFits(p.shape, QueryMap(s, head)) && (s.phi_k ? MapFits(p.shape, *s.phi_k) : codes);
}
__device__ inline bool MomentFits(const DeviceSummary& s) {
  return s.mean_key && s.key_m2 && s.mean_value &&
         (s.cross_rank == 0 || (s.key_factor && s.value_factor));
}
__device__ inline bool ClustersFit(const StepParams& p, const DeviceSummary& s) {
  if (s.n_clusters == 0 || s.n_clusters > p.shape.max_clusters || !s.cluster_counts ||
      !s.cluster_values || !p.args.row_clusters) {
    return false;
  }
  if (s.estimator == EstimatorKind::kScan) return s.scan_log_mass && s.scan_retrieved_scores;
  return s.cluster_keys && s.cluster_spreads;
}

// Returns whether the summary has what its estimator needs; of the query maps, only that of `head`
// is checked.
__device__ inline bool SummaryFits(const StepParams& p, const DeviceSummary& s, uint32_t head) {
  if (s.estimator == EstimatorKind::kNone) return true;
  if (p.shape.layer.softcap != 0) return false;
  if (s.estimator == EstimatorKind::kPhi) return PhiFits(p, s, head);
  if (s.estimator == EstimatorKind::kMoment) return MomentFits(s);
  return UsesClusters(s.estimator) && ClustersFit(p, s);
}

}  // namespace prefixd::gpu::internal
