// Keeps sessions' data on the device from step to step: summaries, feature maps and anchors, so
// that a step copies only what is new to it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>

#include "attention/step/step.h"
#include "gpu/device/device_buffer.h"

namespace prefixd::gpu {

namespace internal {
struct ResidentGroup;
}

// Entries are found by the addresses of their host originals, and hold only as long as the owner
// that the caller names lives: an address that is used again belongs to another owner. Beyond the
// limit the least recently used entries go first. Thread-safety: any thread.
class ResidentSummaries {
 public:
  explicit ResidentSummaries(size_t limit_bytes) : limit_(limit_bytes) {}

  // Returns the kept part of a group that CheckBatch (gpu/step/host_batch.h) passed; copied on
  // first use. Null where it does not fit the limit or the device: then it travels with the step.
  // owner: while it lives, the data that `in` points to stays unchanged, except for retrieved rows
  // and per-step spans. The copy is made, and waited for, on `stream`. Errors: CUDA's errors of the
  // copy.
  Result<std::shared_ptr<const internal::ResidentGroup>> Find(
      const GroupStepInput& in, const std::shared_ptr<const void>& owner, Stream stream);

  size_t bytes() const;  // bytes on the device now

 private:
  // The key is the owner, the parts of the summary, the anchors, and the source of recomputed
  // features.
  using Key = std::tuple<const void*, const void*, const void*, const void*, const void*,
                         const void*, const void*, const void*, int>;
  struct Entry {
    std::weak_ptr<const void> owner;
    std::shared_ptr<const internal::ResidentGroup> group;
    size_t bytes = 0;
    std::list<Key>::iterator used;  // in order_
  };
  static Key KeyOf(const GroupStepInput& in, const void* owner);
  void Drop(std::map<Key, Entry>::iterator entry);
  void MakeRoom(size_t bytes);

  const size_t limit_;
  mutable std::mutex mutex_;
  std::map<Key, Entry> entries_;
  std::list<Key> order_;  // most recently used first
  size_t bytes_ = 0;
};

}  // namespace prefixd::gpu
