// Maps a whole file read-only. Move-only; unmaps on destruction.
//
// The mapping is private and read-only, but later reads fault (SIGBUS) when another process
// truncates the file meanwhile. Files for prefixd are therefore replaced by rename and never
// rewritten in place (WriteSafetensors does that).
#pragma once

#include <cstddef>
#include <filesystem>
#include <span>
#include <utility>

#include "prefixd/result.h"

namespace prefixd {

class MappedFile {
 public:
  // kNotFound, kInvalidArgument (not a regular file) or kIo; the message names the file.
  static Result<MappedFile> Open(const std::filesystem::path& path);

  MappedFile(MappedFile&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  MappedFile& operator=(MappedFile&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }
  ~MappedFile();

  // Returns bytes that are valid as long as this object (or the one it was moved to) lives; empty
  // for an empty file.
  std::span<const std::byte> bytes() const { return {data_, size_}; }

 private:
  MappedFile(const std::byte* data, size_t size) : data_(data), size_(size) {}

  const std::byte* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace prefixd
