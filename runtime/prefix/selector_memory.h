// Bounds the memory that selection takes, over all prefixes that sessions hold: indexes count
// first, since steps cannot do without them, and exact keys stay in memory only as far as there is
// room beside them. What is leased counts in the store's budget of memory too.
//
// Thread-safety: all methods may be called concurrently. A lease returns its bytes on destruction,
// and must not outlive the SelectorMemory.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <utility>

#include "base/check.h"
#include "base/memory_budget.h"
#include "prefixd/result.h"

namespace prefixd {

class SelectorMemory {
 public:
  class Lease {
   public:
    Lease() = default;
    Lease(Lease&& other) noexcept
        : of_(std::exchange(other.of_, nullptr)),
          bytes_(std::exchange(other.bytes_, 0)),
          memory_(std::move(other.memory_)) {}
    Lease& operator=(Lease&& other) noexcept {
      std::swap(of_, other.of_);
      std::swap(bytes_, other.bytes_);
      std::swap(memory_, other.memory_);
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
    Lease(SelectorMemory* of, uint64_t bytes, MemoryCharge memory)
        : of_(of), bytes_(bytes), memory_(std::move(memory)) {}
    SelectorMemory* of_ = nullptr;
    uint64_t bytes_ = 0;
    MemoryCharge memory_;
  };

  explicit SelectorMemory(uint64_t capacity) : capacity_(capacity) {}

  // `release` frees some memory that its owner can do without; false: nothing is left. Called when
  // there is no room. Set once, before the first lease.
  void OnShortage(std::function<bool()> release) { release_ = std::move(release); }

  // Counts an index's bytes beyond the bound too; kResourceExhausted when the budget that `account`
  // belongs to has no room.
  Result<Lease> Charge(const MemoryAccount& account, uint64_t bytes);
  // Returns an empty lease when there is no room for so many bytes of keys.
  Lease TryTake(const MemoryAccount& account, uint64_t bytes);
  // Frees what owners can do without until so many bytes more have room; false: there is none.
  bool MakeRoom(uint64_t bytes);
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
