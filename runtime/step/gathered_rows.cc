#include "runtime/step/gathered_rows.h"

#include <algorithm>
#include <new>

#include "base/check.h"

namespace prefixd {

void GatheredRows::Put(const RowsView& rows, size_t begin, size_t n) {
  const RowShape& row = rows.shape;
  PREFIXD_CHECK((begin + n) * row.bytes() <= bytes.size(), begin, n, bytes.size());
  std::byte* out = bytes.data() + begin * row.bytes();
  // The copy bypasses the caches, because this step reads the original rows.
  for (size_t i = begin; i < begin + n; ++i) {
    StreamCopyUnfenced(out, rows.key(i), row.key_bytes());
    StreamCopyUnfenced(out + row.key_bytes(), rows.value(i), row.value_bytes());
    out += row.bytes();
  }
}

GatheredRowCache::GatheredRowCache(uint64_t capacity, const std::shared_ptr<MemoryBudget>& memory)
    : capacity_(capacity) {
  if (!memory) return;
  memory_ = memory->Shared().Charge(MemoryKind::kGatheredRows);
  giver_ = memory->OnShortage(
      [this](uint64_t, const std::string* tenant) { return !tenant && FreeSpare(); });
}

bool GatheredRowCache::FreeSpare() {
  std::unique_ptr<GatheredRows> gone;  // freed after the lock
  std::lock_guard lock(mutex_);
  if (spare_.empty()) return false;
  gone = std::move(spare_.front());
  spare_.pop_front();
  spare_bytes_ -= gone->bytes.size();
  used_ -= gone->bytes.size();
  memory_.Set(used_);
  return true;
}

// mutex_ is held.
std::unique_ptr<GatheredRows> GatheredRowCache::TakeSpare(size_t bytes) {
  auto best = spare_.end();
  for (auto it = spare_.begin(); it != spare_.end(); ++it) {
    const size_t size = (*it)->bytes.size();
    // Much larger buffers stay for larger sets.
    if (size < bytes || size / 2 > bytes) continue;
    if (best == spare_.end() || size < (*best)->bytes.size()) best = it;
  }
  if (best == spare_.end()) return nullptr;
  std::unique_ptr<GatheredRows> rows = std::move(*best);
  spare_.erase(best);
  spare_bytes_ -= rows->bytes.size();
  return rows;
}

std::shared_ptr<GatheredRows> GatheredRowCache::Take(std::span<const uint32_t> ids, RowShape row) {
  const size_t bytes = ids.size() * row.bytes();
  if (bytes == 0) return nullptr;
  // The headroom lets other sets of the session, slightly larger, reuse the buffer.
  const size_t some_more = storage::AlignedBuffer::Footprint(bytes + bytes / 8);
  try {
    std::unique_ptr<GatheredRows> rows;
    std::vector<std::unique_ptr<GatheredRows>> gone;  // freed after the lock
    {
      std::lock_guard lock(mutex_);
      rows = TakeSpare(bytes);
      if (!rows && used_ - spare_bytes_ + some_more > capacity_) return nullptr;
      while (!rows && used_ + some_more > capacity_) {
        const size_t freed = spare_.front()->bytes.size();
        gone.push_back(std::move(spare_.front()));
        spare_.pop_front();
        spare_bytes_ -= freed;
        used_ -= freed;
      }
      if (!rows && !memory_.TryResize(used_ + some_more)) {
        memory_.Set(used_);
        return nullptr;
      }
      if (!rows) used_ += some_more;
    }
    gone.clear();
    if (!rows) rows = Fresh(some_more);
    std::shared_ptr<GatheredRows> copy(rows.release(), [this](GatheredRows* done) {
      GiveBack(std::unique_ptr<GatheredRows>(done));
    });
    copy->ids.assign(ids.begin(), ids.end());
    return copy;
  } catch (const std::bad_alloc&) {
    return nullptr;  // the step does without a copy
  }
}

std::unique_ptr<GatheredRows> GatheredRowCache::Fresh(size_t bytes) {
  try {
    auto rows = std::make_unique<GatheredRows>();
    rows->bytes = storage::AlignedBuffer(bytes);
    return rows;
  } catch (const std::bad_alloc&) {
    std::lock_guard lock(mutex_);
    used_ -= bytes;
    memory_.Set(used_);
    throw;
  }
}

void GatheredRowCache::GiveBack(std::unique_ptr<GatheredRows> rows) {
  const size_t bytes = rows->bytes.size();
  std::lock_guard lock(mutex_);
  try {
    spare_.push_back(std::move(rows));
    spare_bytes_ += bytes;
  } catch (const std::bad_alloc&) {
    used_ -= bytes;
    memory_.Set(used_);
  }
}

uint64_t GatheredRowCache::used() const {
  std::lock_guard lock(mutex_);
  return used_;
}

}  // namespace prefixd
