// Makes room for writes within the limits: reserves space, and evicts other prefixes where that is
// allowed and helps.
//
// Thread-safety: all methods may be called concurrently. One eviction runs at a time, under the
// eviction mutex, which is locked before the store's commit mutex; the mutex of the counts is the
// last.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "base/call_scope.h"
#include "storage/catalog/eviction.h"
#include "storage/catalog/prefix_tree.h"
#include "storage/core/segment_removal.h"
#include "storage/files/blob_store.h"
#include "storage/files/space.h"
#include "storage/files/store_options.h"

namespace prefixd::storage {

// Says whether a write may evict other prefixes.
enum class Room : uint8_t { kMayEvict, kAsItIs };

class RoomMaker {
 public:
  // All borrowed.
  struct Parts {
    const StoreOptions& options;
    std::mutex& commit_mutex;
    PrefixTree& tree;
    const BlobStore& blobs;
    SpaceAccount& space;
    SegmentRemoval& removal;
    // While one is taken its links keep the space of what is evicted.
    const std::atomic<bool>& snapshot_taken;
  };
  explicit RoomMaker(const Parts& parts) : parts_(parts) {}

  // kResourceExhausted below the free-space watermark or above a quota, when evicting does not help
  // either; then nothing was evicted, but for what showed that the disk gives no space back (a
  // snapshot of the file system keeps it): after that nothing is evicted for the disk's sake for a
  // minute.
  Result<SpaceReservation> Reserve(const std::string& tenant, uint64_t bytes, Room room);
  // Evicts a little ahead of the puts, if there were any: for their tenants' quotas, the store's
  // and the disk. Nothing goes that is large beside what is missing.
  Status MakeHeadroom();
  // Lists every tenant with bytes, a quota or evictions.
  std::vector<TenantUsage> Tenants() const;

 private:
  EvictionPlan NewPlan() const;
  // Returns why evicting frees no space on the disk; empty: it does. REQUIRES eviction_mutex_.
  std::string WhyFutile() const;
  // Notes what is still short on the disk after an eviction for `before` bytes of it. REQUIRES
  // eviction_mutex_.
  void NoteFreed(uint64_t before, uint64_t after);
  // Returns false and evicts nothing when everything that may go frees too little; CheckCall's
  // error when it was ended early. REQUIRES eviction_mutex_, as Evict does.
  Result<bool> EvictFor(const std::string& tenant, const SpaceShortage& shortage, const char* why);
  // `for_quota`: so many of the first go for their tenant's quota.
  Status Evict(std::span<const EvictionNode> victims, size_t for_quota, const char* why);
  RemovalCause CauseOf(const EvictionNode& victim, bool for_quota, const char* why) const;
  bool Retained(const SegmentId& id) const;

  const Parts parts_;
  CallMutex eviction_mutex_;
  // Guarded by eviction_mutex_.
  std::set<std::string, std::less<>> wanted_room_;  // whose puts came since the last headroom
  std::map<SegmentId, Error> stuck_;  // what is too damaged to be evicted, in this call
  int in_vain_ = 0;                   // evictions in a row that freed nothing
  std::chrono::steady_clock::time_point futile_until_{};
  struct EvictionCount {
    uint64_t segments = 0, bytes = 0;
  };
  mutable std::mutex count_mutex_;  // guards evicted_
  std::map<std::string, EvictionCount> evicted_;
};

}  // namespace prefixd::storage
