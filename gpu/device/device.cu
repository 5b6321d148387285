#include "gpu/device/cuda_status.h"
#include "prefixd/gpu/device.h"

namespace prefixd::gpu {
namespace {

using internal::CudaStatus;

// LoadProbe is never launched: a query of its attributes tells whether this build's code loads on a
// device.
__global__ void LoadProbe() {}

Error Unavailable(const std::string& why) {
  return {Code::kUnavailable, "no usable CUDA device: " + why};
}

// CurrentDevice restores the device that was current.
class CurrentDevice {
 public:
  CurrentDevice() {
    if (cudaGetDevice(&previous_) != cudaSuccess) previous_ = -1;
  }
  ~CurrentDevice() {
    if (previous_ >= 0) (void)CudaStatus(cudaSetDevice(previous_), "restoring the device");
  }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  int previous_ = -1;
};

}  // namespace

Result<DeviceInfo> ProbeDevice(int ordinal) {
  int count = 0;
  if (const Status s = CudaStatus(cudaGetDeviceCount(&count), "counting devices"); !s.ok()) {
    return Unavailable(s.error().message);
  }
  if (ordinal < 0 || ordinal >= count) {
    return Unavailable("device " + std::to_string(ordinal) + " was asked for, there are " +
                       std::to_string(count));
  }
  const CurrentDevice restore;
  cudaDeviceProp properties{};
  if (const Status s = CudaStatus(cudaSetDevice(ordinal), "choosing the device"); !s.ok()) {
    return Unavailable(s.error().message);
  }
  if (const Status s = CudaStatus(cudaGetDeviceProperties(&properties, ordinal), "describing it");
      !s.ok()) {
    return Unavailable(s.error().message);
  }
  DeviceInfo info;
  info.ordinal = ordinal;
  info.name = properties.name;
  info.major = properties.major;
  info.minor = properties.minor;
  info.multiprocessors = properties.multiProcessorCount;
  info.memory_bytes = properties.totalGlobalMem;
  info.shared_bytes_max = properties.sharedMemPerBlockOptin;

  cudaFuncAttributes attributes{};
  if (const Status s = CudaStatus(cudaFuncGetAttributes(&attributes, LoadProbe), "loading kernels");
      !s.ok()) {
    return Unavailable(info.name + " has compute capability " + std::to_string(info.major) + "." +
                       std::to_string(info.minor) +
                       ", which this build was not compiled for: " + s.error().message);
  }
  return info;
}

}  // namespace prefixd::gpu
