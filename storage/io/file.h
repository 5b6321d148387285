// Wraps files and directories of the store: an owned descriptor and the few system calls around it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <utility>

#include "prefixd/result.h"

namespace prefixd::storage {

// Owns a file descriptor; move-only.
class UniqueFd {
 public:
  UniqueFd() = default;
  explicit UniqueFd(int fd) : fd_(fd) {}
  UniqueFd(UniqueFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept;
  ~UniqueFd() { Close(); }

  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }
  void Close();

 private:
  int fd_ = -1;
};

// Opens with O_CLOEXEC, and a file only where `path` itself is no symbolic link. The error names
// the path.
Result<UniqueFd> OpenFile(const std::filesystem::path& path, int flags, int mode = 0600);
Status SyncDirectory(const std::filesystem::path& dir);
// A missing file is no error.
Status RemoveFile(const std::filesystem::path& path);
// kIo where the system has made the file system read-only (as many do after an error of the disk).
Status CheckWritable(const std::filesystem::path& path);
// Returns the free bytes for unprivileged writers on the file system of `path`.
Result<uint64_t> FreeBytes(const std::filesystem::path& path);
// The size of the file system that `path` lies on.
Result<uint64_t> DiskBytes(const std::filesystem::path& path);
// Allocates the blocks of [0, bytes), so that a full disk shows before anything is written. False
// where the file system cannot allocate; the file then has the size alone.
Result<bool> Preallocate(int fd, uint64_t bytes, const std::filesystem::path& path);
Result<uint64_t> FileBytes(int fd, const std::filesystem::path& path);

// AlignedBuffer is page-aligned memory, fit for O_DIRECT; contents are unspecified.
class AlignedBuffer {
 public:
  AlignedBuffer() = default;
  explicit AlignedBuffer(size_t bytes);
  // Returns the memory that a buffer of `bytes` takes: whole pages, huge ones where they fit.
  static size_t Footprint(size_t bytes);
  std::byte* data() const { return data_.get(); }
  size_t size() const { return size_; }
  std::span<std::byte> span() const { return {data_.get(), size_}; }

 private:
  struct Free {
    void operator()(std::byte* p) const;
  };
  std::unique_ptr<std::byte, Free> data_;
  size_t size_ = 0;
};

}  // namespace prefixd::storage
