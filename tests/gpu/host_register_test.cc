// Memory that is mapped elsewhere, read by a device. Skipped, saying why, where there is none.
#include "gpu/device/host_register.h"

#include <cuda_runtime_api.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <vector>

#include "gpu/device/device_buffer.h"
#include "prefixd/gpu/device.h"
#include "tests/support/test.h"

namespace prefixd::gpu {
namespace {

TEST(HostRegister, WithoutADeviceSaysSo) {
  if (ProbeDevice().ok()) GTEST_SKIP() << "skipped: there is a device";
  std::vector<std::byte> bytes(4096);
  Status s = RegisterHostMemory(bytes);
  ASSERT_FALSE(s.ok());
  EXPECT_EQ(s.error().code, Code::kUnavailable) << s.error().message;
}

// As the host tier has it: blocks of a shared mapping, given back and taken again.
TEST(HostRegister, ASharedBlockIsReadInPlaceAndComesAndGoes) {
  if (const auto probed = ProbeDevice(); !probed.ok()) {
    GTEST_SKIP() << "skipped: no CUDA device (" << probed.error().message << ")";
  }
  constexpr size_t kBlock = 2 << 20;
  const int fd = ::memfd_create("test", MFD_CLOEXEC);
  ASSERT_EQ(::ftruncate(fd, 4 * kBlock), 0);
  void* at = ::mmap(nullptr, 4 * kBlock, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  ASSERT_NE(at, MAP_FAILED);
  const std::span<std::byte> block(static_cast<std::byte*>(at) + kBlock, kBlock);
  auto device = DeviceBuffer::Allocate(kBlock);
  auto stream = OwnedStream::Create();
  ASSERT_TRUE(device.ok() && stream.ok());
  for (int round = 1; round <= 3; ++round) {
    std::memset(block.data(), round, kBlock);
    Status registered = RegisterHostMemory(block);
    ASSERT_TRUE(registered.ok()) << registered.error().message;
    void* seen = nullptr;
    ASSERT_EQ(cudaHostGetDevicePointer(&seen, block.data(), 0), cudaSuccess);
    EXPECT_EQ(seen, block.data());
    EXPECT_FALSE(RegisterHostMemory(block).ok());  // it is already
    ASSERT_TRUE(CopyToDevice(device->data(), block.data(), kBlock, stream->get()).ok());
    std::vector<std::byte> back(kBlock);
    ASSERT_TRUE(CopyToHost(back.data(), device->data(), kBlock, stream->get()).ok());
    ASSERT_TRUE(Synchronize(stream->get()).ok());
    EXPECT_EQ(std::memcmp(back.data(), block.data(), kBlock), 0);
    EXPECT_TRUE(UnregisterHostMemory(block).ok());
    EXPECT_FALSE(UnregisterHostMemory(block).ok());
    ASSERT_EQ(::madvise(block.data(), kBlock, MADV_REMOVE), 0);
  }
  ::munmap(at, 4 * kBlock);
  ::close(fd);
}

}  // namespace
}  // namespace prefixd::gpu
