// Summaries of attention/ as the kernels read them. Internal to gpu/.
//
// What a session keeps from step to step (summaries, feature maps) is packed apart from what every
// step brings (forms, counts, a scan's masses), so that the former may stay on the device.
#pragma once

#include <map>

#include "attention/step/step.h"
#include "gpu/device/host_image.h"
#include "prefixd/gpu/step.h"

namespace prefixd::gpu::internal {

// The estimator that has something to do: none when everything was retrieved.
EstimatorKind Effective(const GroupStepInput& in);
bool UsesClusters(EstimatorKind kind);

// What is packed once although several groups or heads share it.
struct PackedMaps {
  std::map<const FeatureMap*, DeviceQueryMap> query_maps;
  std::map<const FeatureMap*, DeviceKeyMap> key_maps;
};

// The kept part. REQUIRES: CheckBatch (gpu/step/host_batch.h) passed.
DeviceSummary PackSummary(const GroupStepInput& in, HostImage& image, PackedMaps& maps);
// The step's part, into a summary that PackSummary made from a step of the same session.
void AddStepParts(const GroupStepInput& in, HostImage& image, DeviceSummary& summary);

// A group's kept part on the device.
struct ResidentGroup {
  DeviceSummary summary;
  const std::byte *sinks = nullptr, *tail = nullptr;  // rows one behind the other
};
// REQUIRES: as PackSummary.
ResidentGroup PackResident(const GroupStepInput& in, HostImage& image);

}  // namespace prefixd::gpu::internal
