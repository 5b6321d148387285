// Bounds the memory that selection takes, over all prefixes that sessions hold: indexes count
// first, since steps cannot do without them, and exact keys stay in memory only as far as there is
// room beside them.
//
// Thread-safety: all methods may be called concurrently. A lease returns its bytes on destruction,
// and must not outlive the SelectorMemory.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <utility>

#include "base/check.h"

namespace prefixd {

class SelectorMemory {
 public:
  class Lease {
   public:
    Lease() = default;
    Lease(Lease&& other) noexcept
        : of_(std::exchange(other.of_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
    Lease& operator=(Lease&& other) noexcept {
      std::swap(of_, other.of_);
      std::swap(bytes_, other.bytes_);
      return *this;
    }
    ~Lease() {
      if (!of_) return;
      const uint64_t before = of_->used_.fetch_sub(bytes_);
      PREFIXD_CHECK(before >= bytes_, before, bytes_);
    }
    explicit operator bool() const { return of_ != nullptr; }

   private:
    friend class SelectorMemory;
    Lease(SelectorMemory* of, uint64_t bytes) : of_(of), bytes_(bytes) {}
    SelectorMemory* of_ = nullptr;
    uint64_t bytes_ = 0;
  };

  explicit SelectorMemory(uint64_t capacity) : capacity_(capacity) {}

  // `release` frees some memory that its owner can do without; false: nothing is left. Called when
  // there is no room. Set once, before the first lease.
  void OnShortage(std::function<bool()> release) { release_ = std::move(release); }

  // Counts the bytes whether there is room or not.
  Lease Charge(uint64_t bytes);
  // Returns an empty lease when there is no room.
  Lease TryTake(uint64_t bytes);
  // Releases what exceeds the bound, as far as owners can do without it.
  void Trim() {
    while (used_ > capacity_ && release_ && release_()) {
    }
  }
  uint64_t used() const { return used_; }
  uint64_t capacity() const { return capacity_; }

 private:
  const uint64_t capacity_;
  std::atomic<uint64_t> used_{0};
  std::function<bool()> release_;
};

}  // namespace prefixd
