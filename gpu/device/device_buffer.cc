#include "gpu/device/device_buffer.h"

#include "gpu/device/cuda_status.h"

namespace prefixd::gpu {

using internal::CudaStatus;

namespace internal {

// No caller can act on an error at release, and the next unrelated call must not find it.
void FreeDevice::operator()(std::byte* p) const { (void)CudaStatus(cudaFree(p), "free"); }
void FreePinned::operator()(std::byte* p) const {
  (void)CudaStatus(cudaFreeHost(p), "freeing pinned memory");
}
void DestroyStream::operator()(CUstream_st* s) const {
  (void)CudaStatus(cudaStreamDestroy(s), "destroying a stream");
}

}  // namespace internal

Result<DeviceBuffer> DeviceBuffer::Allocate(size_t bytes) {
  DeviceBuffer buffer;
  if (bytes == 0) return buffer;
  void* p = nullptr;
  PREFIXD_TRY(CudaStatus(cudaMalloc(&p, bytes), "allocating device memory"));
  buffer.data_.reset(static_cast<std::byte*>(p));
  buffer.bytes_ = bytes;
  return buffer;
}

Result<PinnedBuffer> PinnedBuffer::Allocate(size_t bytes) {
  PinnedBuffer buffer;
  if (bytes == 0) return buffer;
  void* p = nullptr;
  PREFIXD_TRY(CudaStatus(cudaHostAlloc(&p, bytes, cudaHostAllocPortable), "pinning host memory"));
  buffer.data_.reset(static_cast<std::byte*>(p));
  buffer.bytes_ = bytes;
  return buffer;
}

Result<OwnedStream> OwnedStream::Create() {
  OwnedStream stream;
  cudaStream_t s = nullptr;
  PREFIXD_TRY(CudaStatus(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking), "making a stream"));
  stream.stream_.reset(s);
  return stream;
}

Status CopyToDevice(std::byte* dst, const void* src, size_t bytes, Stream stream) {
  if (bytes == 0) return {};
  return CudaStatus(cudaMemcpyAsync(dst, src, bytes, cudaMemcpyHostToDevice, stream),
                    "copying to the device");
}

Status CopyToHost(void* dst, const std::byte* src, size_t bytes, Stream stream) {
  if (bytes == 0) return {};
  return CudaStatus(cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDeviceToHost, stream),
                    "copying from the device");
}

Status Synchronize(Stream stream) {
  return CudaStatus(cudaStreamSynchronize(stream), "work on a stream");
}

Status UseDevice(int ordinal) { return CudaStatus(cudaSetDevice(ordinal), "choosing a device"); }

}  // namespace prefixd::gpu
