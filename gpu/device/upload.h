// Copies an image (host_image.h) to the device. Internal to gpu/, its tests and benchmarks.
#pragma once

#include "gpu/device/device_buffer.h"
#include "gpu/device/host_image.h"

namespace prefixd::gpu::internal {

struct Upload {
  PinnedBuffer staging;
  DeviceBuffer memory;
};

// Calls pack(HostImage&) twice: to measure, and to fill memory of that size. The copy is ordered on
// `stream`; the caller owns both buffers and keeps them until the stream has come that far.
template <typename Pack>
Result<Upload> UploadImage(Pack pack, Stream stream) {
  HostImage measure(nullptr, nullptr);
  pack(measure);
  Upload out;
  PREFIXD_ASSIGN(out.staging, PinnedBuffer::Allocate(measure.bytes()));
  PREFIXD_ASSIGN(out.memory, DeviceBuffer::Allocate(measure.bytes()));
  HostImage image(out.staging.data(), out.memory.data());
  pack(image);
  PREFIXD_TRY(CopyToDevice(out.memory.data(), out.staging.data(), image.bytes(), stream));
  return out;
}

}  // namespace prefixd::gpu::internal
