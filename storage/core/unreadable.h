// Remembers for a minute which segments the disk could not read, so that matches pass them over
// without another try, which may take the disk seconds, and without another line in the log.
//
// Thread-safety: all methods may be called concurrently.
#pragma once

#include <chrono>
#include <mutex>
#include <unordered_map>

#include "storage/catalog/prefix_tree.h"

namespace prefixd::storage {

class Unreadable {
 public:
  using Clock = std::chrono::steady_clock;

  void Note(const SegmentId& id, Clock::time_point now = Clock::now()) {
    std::lock_guard lock(mutex_);
    std::erase_if(until_, [now](const auto& entry) { return entry.second <= now; });
    until_[id] = now + std::chrono::minutes(1);
  }
  bool Holds(const SegmentId& id, Clock::time_point now = Clock::now()) const {
    std::lock_guard lock(mutex_);
    const auto it = until_.find(id);
    return it != until_.end() && it->second > now;
  }

 private:
  mutable std::mutex mutex_;
  std::unordered_map<SegmentId, Clock::time_point, SegmentIdHash> until_;
};

}  // namespace prefixd::storage
