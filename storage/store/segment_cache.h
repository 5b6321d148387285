// Caches open segment files, most recently used first; files in use elsewhere stay open however
// many there are.
//
// Thread-safety: all methods may be called concurrently; opening happens outside the lock.
#pragma once

#include <cstddef>
#include <list>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "storage/catalog/prefix_tree.h"
#include "storage/segment/segment_file.h"

namespace prefixd::storage {

class SegmentCache {
 public:
  explicit SegmentCache(size_t max_open) : max_open_(max_open) {}

  // Returns the file that holds the segment by this record, if it is open.
  std::shared_ptr<const SegmentFile> Find(const SegmentRecord& record) {
    std::lock_guard lock(mutex_);
    const auto it = index_.find(record.id);
    if (it == index_.end() || (*it->second)->record().file != record.file) return nullptr;
    order_.splice(order_.begin(), order_, it->second);
    return *it->second;
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
    if (order_.size() <= max_open_) return;
    index_.erase(order_.back()->record().id);
    order_.pop_back();
  }

  void Erase(const SegmentRecord& record) {
    std::lock_guard lock(mutex_);
    const auto it = index_.find(record.id);
    if (it == index_.end() || (*it->second)->record().file != record.file) return;
    order_.erase(it->second);
    index_.erase(it);
  }

 private:
  const size_t max_open_;
  std::mutex mutex_;
  std::list<std::shared_ptr<const SegmentFile>> order_;
  std::unordered_map<SegmentId, std::list<std::shared_ptr<const SegmentFile>>::iterator,
                     SegmentIdHash>
      index_;
};

}  // namespace prefixd::storage
