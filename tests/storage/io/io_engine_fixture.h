// Provides an engine of each backend with a file of 8 MiB, and reads that the test ends.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "storage/io/file.h"
#include "storage/io/io_engine.h"
#include "tests/storage/store_backends.h"

namespace prefixd::storage {

class IoEngineTest : public ::testing::TestWithParam<IoBackend> {
 protected:
  void SetUp() override {
    path_ = dir_.path() / "file";
    auto fd = OpenFile(path_, O_RDWR | O_CREAT);
    ASSERT_OK(fd);
    fd_ = std::move(*fd);
    ASSERT_OK(Preallocate(fd_.get(), 8 << 20, path_));
    auto engine = NewEngine(GetParam(), limits_, fd_.get());
    if (GetParam() == IoBackend::kUring && !engine.ok()) {
      GTEST_SKIP() << engine.error().ToString();
    }
    ASSERT_OK(engine);
    engine_ = std::move(*engine);
  }

  TempDir dir_;
  std::filesystem::path path_;
  UniqueFd fd_;
  IoLimits limits_{2 << 20, 8};
  std::unique_ptr<IoEngine> engine_;
};

// A Pipe is a read that the kernel holds until the test writes: the read end of a pipe.
class Pipe {
 public:
  explicit Pipe(int flags = 0) {
    int fds[2];
    if (::pipe2(fds, O_CLOEXEC | flags) != 0) std::abort();
    read_ = UniqueFd(fds[0]);
    write_ = UniqueFd(fds[1]);
  }
  IoOp Read(std::span<std::byte> out) const {
    return {IoKind::kRead, IoPriority::kStepRead,      read_.get(),
            kNoOffset,     {{out.data(), out.size()}}, 0};
  }
  void Write(size_t n) const {
    const std::vector<std::byte> bytes(n, std::byte{7});
    ASSERT_EQ(::write(write_.get(), bytes.data(), n), static_cast<ssize_t>(n));
  }
  void CloseWriteEnd() { write_.Close(); }

 private:
  UniqueFd read_, write_;
};

inline constexpr auto kSoon = std::chrono::milliseconds(20);

}  // namespace prefixd::storage
