#include "gpu/device/host_register.h"

#include "gpu/device/cuda_status.h"

namespace prefixd::gpu {

using internal::CudaStatus;

Status RegisterHostMemory(std::span<std::byte> bytes) {
  return CudaStatus(cudaHostRegister(bytes.data(), bytes.size(),
                                     cudaHostRegisterPortable | cudaHostRegisterMapped),
                    "registering host memory");
}

Status UnregisterHostMemory(std::span<std::byte> bytes) {
  return CudaStatus(cudaHostUnregister(bytes.data()), "unregistering host memory");
}

bool DeviceReads(const std::byte* byte) {
  cudaPointerAttributes attributes{};
  const Status known = CudaStatus(cudaPointerGetAttributes(&attributes, byte), "asking of memory");
  return known.ok() && attributes.type != cudaMemoryTypeUnregistered &&
         attributes.devicePointer == byte;
}

}  // namespace prefixd::gpu
