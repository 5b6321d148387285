// Reuses scratch buffers of one size: the first touch of fresh memory costs as much as reading into
// it from a fast disk.
//
// Thread-safety: all methods may be called concurrently.
#pragma once

#include <cstddef>
#include <mutex>
#include <utility>
#include <vector>

#include "storage/io/file.h"

namespace prefixd::storage {

class BufferPool {
 public:
  // The pool holds at most `keep` idle buffers of `bytes` each.
  BufferPool(size_t bytes, size_t keep) : bytes_(bytes), keep_(keep) {}

  AlignedBuffer Take() {
    std::unique_lock lock(mutex_);
    if (idle_.empty()) {
      lock.unlock();
      return AlignedBuffer(bytes_);
    }
    AlignedBuffer buffer = std::move(idle_.back());
    idle_.pop_back();
    return buffer;
  }

  // Takes back a buffer of Take and ignores an empty one.
  void Give(AlignedBuffer buffer) {
    if (buffer.size() == 0) return;
    std::lock_guard lock(mutex_);
    if (idle_.size() < keep_) idle_.push_back(std::move(buffer));
  }

 private:
  const size_t bytes_, keep_;
  std::mutex mutex_;
  std::vector<AlignedBuffer> idle_;
};

}  // namespace prefixd::storage
