// What a block needs to know of its group, read from device memory and checked. Internal to gpu/.
#pragma once

#include "gpu/tile.cuh"

namespace prefixd::gpu::internal {

// The exact rows of a group: [0, anchors) are anchors, [anchors, count) retrieved.
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

__device__ inline const std::byte* RowAddress(const BatchStepArgs& args, size_t index) {
  if (args.row_addresses) return static_cast<const std::byte*>(args.row_addresses[index]);
  return static_cast<const std::byte*>(args.rows) + index * args.row_stride;
}

// Deviations from the mean key are summed: for the moments, and for phi where it bounds the mass.
__device__ inline bool HasMeanKey(const DeviceSummary& summary) {
  return summary.estimator != EstimatorKind::kNone && summary.mean_key != nullptr;
}

// The map is one that the shape made room for.
__device__ inline bool MapFits(const StepShape& shape, const DeviceFeatureMap& map) {
  return map.in_dim == shape.row.key_dim && map.d_phi == shape.d_phi && map.d_emb <= shape.d_emb;
}

// The summary has what its estimator needs; of the query maps, that of `head` is looked at.
__device__ inline bool SummaryFits(const StepShape& shape, const DeviceSummary& s, uint32_t head) {
  switch (s.estimator) {
    case EstimatorKind::kNone:
      return true;
    case EstimatorKind::kPhi:
      return shape.layer.softcap == 0 && shape.d_phi > 0 && s.phi_m && s.phi_u && s.phi_t &&
             s.phi_q && s.phi_k && MapFits(shape, s.phi_q[head]) && MapFits(shape, *s.phi_k);
    case EstimatorKind::kMoment:
      return shape.layer.softcap == 0 && s.mean_key && s.key_m2 && s.mean_value;
    default:
      return false;
  }
}

}  // namespace prefixd::gpu::internal
