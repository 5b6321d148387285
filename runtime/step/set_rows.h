// Rows of sets that several steps share (shared_sets.h), side by side: copied by the first of these
// steps, which finds them in the host tier, and read in order by the others. To find a row there
// and to read it alone costs a step several times what it costs to attend to it.
//
// Thread-safety: all methods of SetRowsSlot and SetRowsPool may be called concurrently. A copy is
// its maker's alone until it is in a slot, and constant from then on.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "attention/rows/rows.h"
#include "storage/io/file.h"
#include "storage/io/stream_copy.h"

namespace prefixd {

// One set's.
struct SetRows {
  std::vector<uint32_t> ids;  // ascending
  storage::AlignedBuffer bytes;

  RowsView view(RowShape row) const { return {bytes.data(), ids.size(), row.bytes(), row}; }
  // Rows [begin, begin + n) of all. Other threads may read them once they got them from a slot.
  void Put(const RowsView& rows, size_t begin, size_t n);
};

// Where a set's copy is found, once there is one.
class SetRowsSlot {
 public:
  std::shared_ptr<const SetRows> Get() const {
    std::lock_guard lock(mutex_);
    return rows_;
  }
  void Put(std::shared_ptr<const SetRows> rows) {
    storage::StreamFence();
    std::lock_guard lock(mutex_);
    rows_.swap(rows);
  }

 private:
  mutable std::mutex mutex_;
  std::shared_ptr<const SetRows> rows_;
};

// The memory of all copies of a store: a bound, and what earlier copies have left, to be used
// again, since fresh memory costs more than what is copied into it.
class SetRowsPool {
 public:
  explicit SetRowsPool(uint64_t capacity) : capacity_(capacity) {}

  // For the rows of `ids`, none of them copied yet; must go before the pool does. Null where there
  // is no memory for them: then steps find rows as if there were no copies.
  std::shared_ptr<SetRows> Take(std::span<const uint32_t> ids, RowShape row);

  uint64_t used() const;  // bytes, by copies and what they left
  uint64_t capacity() const { return capacity_; }

 private:
  std::unique_ptr<SetRows> TakeSpare(size_t bytes);
  std::unique_ptr<SetRows> Fresh(size_t bytes);  // counted already
  void GiveBack(std::unique_ptr<SetRows> rows);

  const uint64_t capacity_;
  mutable std::mutex mutex_;
  uint64_t used_ = 0, spare_bytes_ = 0;  // the latter among the former
  std::deque<std::unique_ptr<SetRows>> spare_;
};

}  // namespace prefixd
