#include "tests/gpu/emulated/emulated_device.h"

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <vector>

#include "prefixd/gpu/device.h"
#include "tests/gpu/emulated/emulated_cuda.h"

// What a stream has still to do. A stream belongs to one thread at a time.
struct CUstream_st {
  std::deque<std::function<cudaError_t()>> work;
};

namespace prefixd::gpu {
namespace emulated {
namespace {

constexpr size_t kMemoryBytes = size_t{1} << 30;

struct Block {
  size_t bytes;
  cudaMemoryType type;
};
struct Device {
  std::mutex mutex;
  std::map<uintptr_t, Block> memory;
  size_t device_bytes = 0;
  std::atomic<cudaError_t> fault{cudaSuccess};
  std::atomic<uint64_t> kernels{0};
};
Device& TheDevice() {
  static Device device;
  return device;
}

uintptr_t Address(const void* p) { return reinterpret_cast<uintptr_t>(p); }

// What [p, p + bytes) is, as far as one allocation has all of it.
cudaMemoryType TypeOf(const void* p, size_t bytes) {
  Device& device = TheDevice();
  std::lock_guard lock(device.mutex);
  auto after = device.memory.upper_bound(Address(p));
  if (after == device.memory.begin()) return cudaMemoryTypeUnregistered;
  const auto& [begin, block] = *--after;
  return Address(p) + bytes <= begin + block.bytes ? block.type : cudaMemoryTypeUnregistered;
}

cudaError_t Take(void** out, size_t bytes, cudaMemoryType type) {
  constexpr size_t kAlignment = 256;
  Device& device = TheDevice();
  std::lock_guard lock(device.mutex);
  const bool of_device = type == cudaMemoryTypeDevice;
  if (bytes > kMemoryBytes - (of_device ? device.device_bytes : 0)) {
    return cudaErrorMemoryAllocation;
  }
  *out = std::aligned_alloc(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment);
  if (!*out) return cudaErrorMemoryAllocation;
  std::memset(*out, 0xa5, bytes);
  device.memory[Address(*out)] = {bytes, type};
  if (of_device) device.device_bytes += bytes;
  return cudaSuccess;
}

cudaError_t Release(void* p, cudaMemoryType type) {
  if (!p) return cudaSuccess;
  Device& device = TheDevice();
  std::lock_guard lock(device.mutex);
  const auto found = device.memory.find(Address(p));
  if (found == device.memory.end() || found->second.type != type) return cudaErrorInvalidValue;
  if (type == cudaMemoryTypeDevice) device.device_bytes -= found->second.bytes;
  device.memory.erase(found);
  std::free(p);
  return cudaSuccess;
}

cudaError_t Finish(cudaStream_t stream) {
  cudaError_t first = TheDevice().fault;
  while (stream && !stream->work.empty()) {
    const auto next = std::move(stream->work.front());
    stream->work.pop_front();
    if (first == cudaSuccess) first = next();
  }
  return first;
}

// The default stream does at once what it is given.
cudaError_t Put(cudaStream_t stream, std::function<cudaError_t()> work) {
  if (!stream) return work();
  stream->work.push_back(std::move(work));
  return cudaSuccess;
}

}  // namespace

int Enqueue(Stream stream, std::function<int()> kernel) {
  return Put(stream, [kernel = std::move(kernel)] {
    ++TheDevice().kernels;
    return static_cast<cudaError_t>(kernel());
  });
}

void FailWith(cudaError_t error) { TheDevice().fault = error; }
uint64_t KernelsRun() { return TheDevice().kernels; }
size_t DeviceBytes() {
  std::lock_guard lock(TheDevice().mutex);
  return TheDevice().device_bytes;
}

}  // namespace emulated

// In the place of gpu/device/device.cu's.
Result<DeviceInfo> ProbeDevice(int ordinal) {
  if (ordinal != 0) return Error{Code::kUnavailable, "there is one emulated device"};
  DeviceInfo info;
  info.name = "an emulated device";
  info.multiprocessors = 3;
  info.memory_bytes = emulated::kMemoryBytes;
  info.shared_bytes_max = emulated::kDynamicSharedBytes;
  return info;
}

}  // namespace prefixd::gpu

using namespace prefixd::gpu::emulated;

extern "C" {

cudaError_t cudaSetDevice(int device) { return device == 0 ? cudaSuccess : cudaErrorInvalidDevice; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorName(cudaError_t error) {
  return error == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "an emulated error";
}
const char* cudaGetErrorString(cudaError_t error) { return cudaGetErrorName(error); }

cudaError_t cudaMalloc(void** p, size_t bytes) { return Take(p, bytes, cudaMemoryTypeDevice); }
cudaError_t cudaFree(void* p) { return Release(p, cudaMemoryTypeDevice); }
cudaError_t cudaHostAlloc(void** p, size_t bytes, unsigned) {
  return Take(p, bytes, cudaMemoryTypeHost);
}
cudaError_t cudaFreeHost(void* p) { return Release(p, cudaMemoryTypeHost); }
cudaError_t cudaHostRegister(void* p, size_t bytes, unsigned) {
  Device& device = TheDevice();
  std::lock_guard lock(device.mutex);
  const bool added = device.memory.try_emplace(Address(p), Block{bytes, cudaMemoryTypeHost}).second;
  return added ? cudaSuccess : cudaErrorHostMemoryAlreadyRegistered;
}
cudaError_t cudaHostUnregister(void* p) {
  Device& device = TheDevice();
  std::lock_guard lock(device.mutex);
  return device.memory.erase(Address(p)) == 1 ? cudaSuccess : cudaErrorHostMemoryNotRegistered;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* out, const void* p) {
  *out = {};
  out->type = TypeOf(p, 1);
  if (out->type != cudaMemoryTypeUnregistered) out->devicePointer = const_cast<void*>(p);
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  *stream = new CUstream_st;
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  const cudaError_t finished = Finish(stream);
  delete stream;
  return finished;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return Finish(stream); }

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  const bool down = kind == cudaMemcpyHostToDevice;
  const auto copy = [=](const void* source) {
    if (TypeOf(down ? to : from, bytes) != cudaMemoryTypeDevice) return cudaErrorInvalidValue;
    std::memcpy(to, source, bytes);
    return cudaSuccess;
  };
  // Memory that is not page-locked is read before the call returns, or written by then.
  if (TypeOf(down ? from : to, bytes) == cudaMemoryTypeUnregistered) {
    if (!down) {
      const cudaError_t before = Finish(stream);
      return before == cudaSuccess ? copy(from) : before;
    }
    const auto* first = static_cast<const std::byte*>(from);
    return Put(stream,
               [copy, kept = std::vector(first, first + bytes)] { return copy(kept.data()); });
  }
  return Put(stream, [copy, from] { return copy(from); });
}
cudaError_t cudaMemsetAsync(void* p, int value, size_t bytes, cudaStream_t stream) {
  return Put(stream, [=] {
    if (TypeOf(p, bytes) != cudaMemoryTypeDevice) return cudaErrorInvalidValue;
    std::memset(p, value, bytes);
    return cudaSuccess;
  });
}

}  // extern "C"
