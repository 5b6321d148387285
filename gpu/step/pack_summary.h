// Packs summaries of attention/ for the kernels. Internal to gpu/.
//
// Data that a session keeps from step to step (summaries, feature maps) is packed apart from data
// that every step brings (forms, counts, a scan's masses), so that the former may stay on the
// device.
#pragma once

#include <map>

#include "attention/step/step.h"
#include "gpu/device/host_image.h"
#include "prefixd/gpu/step.h"

namespace prefixd::gpu::internal {

// Returns the estimator that has work to do: none when everything was retrieved.
EstimatorKind Effective(const GroupStepInput& in);
bool UsesClusters(EstimatorKind kind);

// PackedMaps are packed once although several groups or heads share them.
struct PackedMaps {
  std::map<const FeatureMap*, DeviceQueryMap> query_maps;
  std::map<const FeatureMap*, DeviceKeyMap> key_maps;
};

// Packs the kept part. REQUIRES: CheckBatch (gpu/step/host_batch.h) passed.
DeviceSummary PackSummary(const GroupStepInput& in, HostImage& image, PackedMaps& maps);
// Adds the step's part to a summary that PackSummary made from a step of the same session.
void AddStepParts(const GroupStepInput& in, HostImage& image, DeviceSummary& summary);

// A ResidentGroup is a group's kept part on the device.
struct ResidentGroup {
  DeviceSummary summary;
  const std::byte *sinks = nullptr, *tail = nullptr;  // rows one behind the other
};
// REQUIRES: CheckBatch passed.
ResidentGroup PackResident(const GroupStepInput& in, HostImage& image);

}  // namespace prefixd::gpu::internal
