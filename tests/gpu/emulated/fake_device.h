// A device to plan launches for that emulated blocks carry out.
#pragma once

#include "prefixd/gpu/device.h"
#include "tests/gpu/emulated/emulated_cuda.h"

namespace prefixd::gpu {

// Of so many multiprocessors: few or many splits.
inline DeviceInfo FakeDevice(int multiprocessors) {
  DeviceInfo device;
  device.name = "an emulated device";
  device.multiprocessors = multiprocessors;
  device.shared_bytes_max = emulated::kDynamicSharedBytes;
  return device;
}

}  // namespace prefixd::gpu
