// Shares memory between one client and the daemon: a memfd that can neither shrink nor grow (a
// truncated mapping would raise SIGBUS in the other process).
//
// Either side may change any byte at any time, so a reader copies the bytes first and checks the
// copy.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "prefixd/result.h"

namespace prefixd {

// Owns the mapping and, where it created the memory, the descriptor. Move-only.
class SharedRegion {
 public:
  SharedRegion() = default;
  ~SharedRegion();
  SharedRegion(SharedRegion&& other) noexcept;
  SharedRegion& operator=(SharedRegion&& other) noexcept;

  // Makes a sealed region of `bytes`; the system takes pages only when they are touched. kIo,
  // kResourceExhausted.
  static Result<SharedRegion> Create(uint64_t bytes);
  // Maps a received descriptor and takes ownership of it, also on failure. kInvalidArgument when
  // it is shorter than `bytes` or could still shrink.
  static Result<SharedRegion> Map(int fd, uint64_t bytes);

  // Like Map, for memory that only the other side writes: a write here raises SIGSEGV.
  static Result<SharedRegion> MapReadOnly(int fd, uint64_t bytes);

  bool empty() const { return data_ == nullptr; }
  std::span<std::byte> bytes() const { return {data_, size_}; }
  int fd() const { return fd_; }
  void CloseFd();  // the mapping stays

 private:
  static Result<SharedRegion> MapWith(int fd, uint64_t bytes, int protection);

  std::byte* data_ = nullptr;
  size_t size_ = 0;
  int fd_ = -1;
};

}  // namespace prefixd
