// Keeps buffers from step to step, so that the hot path allocates only while it warms up.
//
// Thread-safety: ScratchPool may be used from any thread; one Scratch by one thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "attention/step/exact_pass.h"
#include "base/memory_budget.h"
#include "index/search/key_index.h"
#include "storage/store/prefix_store.h"

namespace prefixd {

struct Scratch {
  std::vector<std::byte> rows;        // runs of rows read for one head
  storage::RowViews retrieved;        // rows that a step retrieved
  std::vector<std::byte> found_keys;  // keys that a selection read
  std::vector<RowRef> joined;         // rows read, and others that are in memory
  std::vector<float> queries;         // one group's queries, gathered
  std::vector<float> y, lse, rho_z, scores;
  index::SearchScratch search;
  ExactPass exact;  // over own tokens
  MemoryCharge memory;

  // Returns the first n elements of `buffer`, which grows (and never shrinks) to hold them.
  template <typename T>
  static std::span<T> Take(std::vector<T>& buffer, size_t n) {
    if (buffer.size() < n) buffer.resize(n);
    return {buffer.data(), n};
  }
  // The memory of all buffers.
  uint64_t bytes() const {
    const auto sum = [](const auto&... buffers) {
      return (uint64_t{0} + ... + (buffers.capacity() * sizeof(buffers.front())));
    };
    return sum(rows, retrieved.rows, retrieved.own, found_keys, joined, queries, y, lse, rho_z,
               scores) +
           sum(search.code_scores, search.picked, search.block_means, search.ranks, search.raised,
               search.sampled, search.scores, search.ids, search.found, search.listed, search.marks,
               search.refs, search.keys) +
           exact.bytes();
  }
};

class ScratchPool {
 public:
  class Lease {
   public:
    Lease(ScratchPool* pool, std::unique_ptr<Scratch> scratch)
        : pool_(pool), scratch_(std::move(scratch)) {}
    ~Lease() {
      // One that memory has no room for is not kept.
      if (!scratch_->memory.TryResize(scratch_->bytes())) return;
      std::lock_guard lock(pool_->mutex_);
      pool_->free_.push_back(std::move(scratch_));
    }
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;
    Scratch& operator*() const { return *scratch_; }
    Scratch* operator->() const { return scratch_.get(); }

   private:
    ScratchPool* pool_;
    std::unique_ptr<Scratch> scratch_;
  };

  explicit ScratchPool(const std::shared_ptr<MemoryBudget>& memory = {}) {
    if (!memory) return;
    account_ = memory->Shared();
    giver_ = memory->OnShortage(
        [this](uint64_t, const std::string* tenant) { return !tenant && FreeOne(); });
  }

  Lease Acquire() {
    std::unique_ptr<Scratch> scratch;
    {
      std::lock_guard lock(mutex_);
      if (!free_.empty()) {
        scratch = std::move(free_.back());
        free_.pop_back();
      }
    }
    if (!scratch) {
      scratch = std::make_unique<Scratch>();
      scratch->memory = account_.Charge(MemoryKind::kScratch);
    }
    return Lease(this, std::move(scratch));
  }

 private:
  bool FreeOne() {
    std::unique_ptr<Scratch> gone;  // freed after the lock
    std::lock_guard lock(mutex_);
    if (free_.empty()) return false;
    gone = std::move(free_.back());
    free_.pop_back();
    return true;
  }

  MemoryAccount account_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Scratch>> free_;
  MemoryBudget::Giver giver_;
};

}  // namespace prefixd
