// Defines memory and streams that own themselves, for callers and tests; the step itself allocates
// nothing.
//
// All are move-only; a moved-from or default-made object owns nothing. They belong to the device
// that was current when they were made. Thread-safety: one owner at a time.
#pragma once

#include <cstddef>
#include <memory>

#include "prefixd/gpu/device.h"
#include "prefixd/result.h"

namespace prefixd::gpu {

namespace internal {
struct FreeDevice {
  void operator()(std::byte* p) const;
};
struct FreePinned {
  void operator()(std::byte* p) const;
};
struct DestroyStream {
  void operator()(CUstream_st* s) const;
};
}  // namespace internal

// A DeviceBuffer is device memory, 256-byte aligned, not initialised. kResourceExhausted when there
// is not enough.
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  static Result<DeviceBuffer> Allocate(size_t bytes);

  std::byte* data() const { return data_.get(); }
  size_t bytes() const { return bytes_; }
  template <typename T>
  T* as() const {
    return reinterpret_cast<T*>(data_.get());
  }

 private:
  std::unique_ptr<std::byte, internal::FreeDevice> data_;
  size_t bytes_ = 0;
};

// A PinnedBuffer is page-locked host memory; kernels may read it at the same address.
class PinnedBuffer {
 public:
  PinnedBuffer() = default;
  static Result<PinnedBuffer> Allocate(size_t bytes);

  std::byte* data() const { return data_.get(); }
  size_t bytes() const { return bytes_; }

 private:
  std::unique_ptr<std::byte, internal::FreePinned> data_;
  size_t bytes_ = 0;
};

class OwnedStream {
 public:
  OwnedStream() = default;
  static Result<OwnedStream> Create();
  Stream get() const { return stream_.get(); }

 private:
  std::unique_ptr<CUstream_st, internal::DestroyStream> stream_;
};

// The copy is ordered on `stream`; host memory must stay as it is until the stream has come that
// far.
Status CopyToDevice(std::byte* dst, const void* src, size_t bytes, Stream stream);
Status CopyToHost(void* dst, const std::byte* src, size_t bytes, Stream stream);
// Waits for the stream and returns the errors of its work.
Status Synchronize(Stream stream);
// Makes `ordinal` the calling thread's current device.
Status UseDevice(int ordinal);

}  // namespace prefixd::gpu
