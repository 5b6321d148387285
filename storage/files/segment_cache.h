// Caches open segment files, most recently used first, within bounds on their number and on their
// memory. Files in use elsewhere stay open beside these, and are found, so that a segment is open
// once (open_files.h bounds them all).
//
// Thread-safety: all methods may be called concurrently; opening happens outside the lock.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

#include "storage/catalog/prefix_tree.h"
#include "storage/segment/segment_file.h"

namespace prefixd::storage {

class SegmentCache {
 public:
  SegmentCache(size_t max_open, uint64_t max_bytes) : max_open_(max_open), max_bytes_(max_bytes) {}

  // Returns the file that holds the segment by this record, if it is open.
  std::shared_ptr<const SegmentFile> Find(const SegmentRecord& record) {
    std::lock_guard lock(mutex_);
    const auto it = index_.find(record.id);
    if (it == index_.end()) return FindInUse(record);
    if ((*it->second)->record().file != record.file) return nullptr;
    order_.splice(order_.begin(), order_, it->second);
    const auto found = *it->second;
    Trim();  // its row orders grow while it is open
    return found;
  }

  void Add(std::shared_ptr<const SegmentFile> file) {
    std::lock_guard lock(mutex_);
    const SegmentId id = file->record().id;
    if (const auto it = index_.find(id); it != index_.end()) {
      if ((*it->second)->record().file == file->record().file) return;
      order_.erase(it->second);
      index_.erase(it);
    }
    order_.push_front(std::move(file));
    index_[id] = order_.begin();
    Trim();
  }

  // Closes the file that was used least recently of those that are open for the cache alone (and
  // belong to `tenant`, unless that is null). False: there is none.
  bool CloseOne(const std::string* tenant) {
    std::lock_guard lock(mutex_);
    for (auto it = order_.end(); it != order_.begin();) {
      --it;
      if (it->use_count() > 1 || (tenant && (*it)->record().tenant != *tenant)) continue;
      Close(it);
      return true;
    }
    return false;
  }

  uint64_t bytes() const {
    std::lock_guard lock(mutex_);
    return BytesLocked();
  }

  void Erase(const SegmentRecord& record) {
    std::lock_guard lock(mutex_);
    in_use_.erase(record.id);
    const auto it = index_.find(record.id);
    if (it == index_.end() || (*it->second)->record().file != record.file) return;
    order_.erase(it->second);
    index_.erase(it);
  }

 private:
  using Order = std::list<std::shared_ptr<const SegmentFile>>;

  // The methods below require mutex_.
  uint64_t BytesLocked() const {
    uint64_t bytes = 0;
    for (const auto& file : order_) bytes += file->memory_bytes();
    return bytes;
  }
  void Close(Order::iterator it) {
    const SegmentId id = (*it)->record().id;
    if (it->use_count() > 1) in_use_[id] = *it;
    index_.erase(id);
    order_.erase(it);
    if (in_use_.size() <= 2 * used_before_) return;
    std::erase_if(in_use_, [](const auto& file) { return file.second.expired(); });
    used_before_ = in_use_.size() + 64;
  }
  std::shared_ptr<const SegmentFile> FindInUse(const SegmentRecord& record) {
    const auto it = in_use_.find(record.id);
    if (it == in_use_.end()) return nullptr;
    auto file = it->second.lock();
    return file && file->record().file == record.file ? file : nullptr;
  }
  // The file used last stays, whatever its size.
  void Trim() {
    uint64_t bytes = BytesLocked();
    while (order_.size() > 1 && (order_.size() > max_open_ || bytes > max_bytes_)) {
      bytes -= std::min(bytes, order_.back()->memory_bytes());
      Close(std::prev(order_.end()));
    }
  }

  const size_t max_open_;
  const uint64_t max_bytes_;
  mutable std::mutex mutex_;
  Order order_;
  std::unordered_map<SegmentId, Order::iterator, SegmentIdHash> index_;
  // Those that left the cache while they were in use; some have been closed since.
  std::unordered_map<SegmentId, std::weak_ptr<const SegmentFile>, SegmentIdHash> in_use_;
  size_t used_before_ = 64;  // when closed ones were last taken out
};

}  // namespace prefixd::storage
