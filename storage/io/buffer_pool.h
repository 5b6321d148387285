// Reuses scratch buffers of one size: the first touch of fresh memory costs as much as reading into
// it from a fast disk.
//
// Thread-safety: all methods may be called concurrently.
#pragma once

#include <cstddef>
#include <mutex>
#include <utility>
#include <vector>

#include "base/memory_budget.h"
#include "storage/io/file.h"

namespace prefixd::storage {

class BufferPool {
 public:
  // The pool holds at most `keep` idle buffers of `bytes` each, as far as `idle` has room for them.
  BufferPool(size_t bytes, size_t keep, MemoryCharge idle = {})
      : bytes_(bytes), keep_(keep), charge_(std::move(idle)) {
    idle_.reserve(keep);
  }

  AlignedBuffer Take() {
    std::unique_lock lock(mutex_);
    if (idle_.empty()) {
      lock.unlock();
      return AlignedBuffer(bytes_);
    }
    AlignedBuffer buffer = std::move(idle_.back());
    idle_.pop_back();
    charge_.Set(idle_.size() * bytes_);
    return buffer;
  }

  // Takes back a buffer of Take and ignores an empty one. Allocates nothing.
  void Give(AlignedBuffer buffer) {
    if (buffer.size() == 0) return;
    std::lock_guard lock(mutex_);
    if (idle_.size() >= keep_ || !charge_.TryResize((idle_.size() + 1) * bytes_)) return;
    idle_.push_back(std::move(buffer));
  }

 private:
  const size_t bytes_, keep_;
  std::mutex mutex_;
  std::vector<AlignedBuffer> idle_;
  MemoryCharge charge_;
};

}  // namespace prefixd::storage
