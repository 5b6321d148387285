// Keeps buffers from step to step, so that the hot path allocates only while it warms up.
//
// Thread-safety: ScratchPool may be used from any thread; one Scratch by one thread at a time.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "index/search/key_index.h"
#include "storage/store/prefix_store.h"

namespace prefixd {

struct Scratch {
  std::vector<std::byte> rows;        // runs of rows read for one head
  storage::RowViews retrieved;        // rows that a step retrieved
  std::vector<std::byte> found_keys;  // keys that a selection read
  std::vector<float> queries;         // one group's queries, gathered
  std::vector<float> y, lse, rho_z, scores;
  index::SearchScratch search;

  // Returns the first n elements of `buffer`, which grows (and never shrinks) to hold them.
  template <typename T>
  static std::span<T> Take(std::vector<T>& buffer, size_t n) {
    if (buffer.size() < n) buffer.resize(n);
    return {buffer.data(), n};
  }
};

class ScratchPool {
 public:
  class Lease {
   public:
    Lease(ScratchPool* pool, std::unique_ptr<Scratch> scratch)
        : pool_(pool), scratch_(std::move(scratch)) {}
    ~Lease() {
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

  Lease Acquire() {
    std::unique_ptr<Scratch> scratch;
    {
      std::lock_guard lock(mutex_);
      if (!free_.empty()) {
        scratch = std::move(free_.back());
        free_.pop_back();
      }
    }
    if (!scratch) scratch = std::make_unique<Scratch>();
    return Lease(this, std::move(scratch));
  }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<Scratch>> free_;
};

}  // namespace prefixd
