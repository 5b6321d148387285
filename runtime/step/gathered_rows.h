// Keeps contiguous copies of rows in sets that several steps share (shared_sets.h): the first of
// these steps copies the rows that it finds in the host tier, and the others read them in order.
// Finding a row in the tier and reading it alone costs a step several times what attending to it
// costs.
//
// Thread-safety: all methods of GatheredRowsSlot and GatheredRowCache may be called concurrently.
// Only its maker may use a copy until it is in a slot; it is constant from then on.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "attention/rows/rows.h"
#include "base/memory_budget.h"
#include "base/rows/stream_copy.h"
#include "storage/io/file.h"

namespace prefixd {

// The copied rows of one set.
struct GatheredRows {
  std::vector<uint32_t> ids;  // ascending
  storage::AlignedBuffer bytes;

  RowsView view(RowShape row) const { return {bytes.data(), ids.size(), row.bytes(), row}; }
  // Copies rows [begin, begin + n) of the set. Other threads may read them once they got them from
  // a slot.
  void Put(const RowsView& rows, size_t begin, size_t n);
};

// Publishes the copy of a set's rows, once there is one.
class GatheredRowsSlot {
 public:
  std::shared_ptr<const GatheredRows> Get() const {
    std::lock_guard lock(mutex_);
    return rows_;
  }
  void Put(std::shared_ptr<const GatheredRows> rows) {
    StreamFence();
    std::lock_guard lock(mutex_);
    rows_.swap(rows);
  }

 private:
  mutable std::mutex mutex_;
  std::shared_ptr<const GatheredRows> rows_;
};

// Owns the memory of all copies in a store, within a bound. It reuses the buffers of earlier
// copies, since fresh memory costs more than what is copied into it.
class GatheredRowCache {
 public:
  // memory: where the bytes count, too; null: nowhere.
  explicit GatheredRowCache(uint64_t capacity, const std::shared_ptr<MemoryBudget>& memory = {});

  // Returns a buffer for the rows of `ids`, with no row copied yet; it must go before the pool
  // does. Null where there is no memory: steps then read the rows from the host tier.
  std::shared_ptr<GatheredRows> Take(std::span<const uint32_t> ids, RowShape row);

  uint64_t used() const;  // bytes in copies and spare buffers
  uint64_t capacity() const { return capacity_; }

 private:
  std::unique_ptr<GatheredRows> TakeSpare(size_t bytes);
  std::unique_ptr<GatheredRows> Fresh(size_t bytes);  // `bytes` are counted already
  void GiveBack(std::unique_ptr<GatheredRows> rows);
  bool FreeSpare();  // the oldest; false: there is none

  const uint64_t capacity_;
  mutable std::mutex mutex_;
  uint64_t used_ = 0, spare_bytes_ = 0;  // used_ includes spare_bytes_
  std::deque<std::unique_ptr<GatheredRows>> spare_;
  MemoryCharge memory_;  // used_
  MemoryBudget::Giver giver_;
};

}  // namespace prefixd
