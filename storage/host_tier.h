// A bounded cache of verified segment pages in host memory, with S3-FIFO eviction (Yang et al.,
// SOSP 2023): newcomers wait in a small queue and reach the main one only when used again, so that
// pages read once leave first. Scans neither raise a page's worth nor evict anything.
//
// Thread-safety: all methods may be called concurrently; pages are spread over locked shards.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "storage/segment_format.h"

namespace prefixd::storage {

struct PageKey {
  uint64_t segment = 0;  // the segment's sequence number, unique in a store
  uint64_t page = 0;
  bool operator==(const PageKey&) const = default;
};

// kBackground: rewriting; leaves the tier alone.
enum class Access : uint8_t { kPoint, kScan, kBackground };

class HostTier {
 public:
  // Whole pages that fit into `capacity_bytes`; 0 caches nothing. Memory is taken when first used.
  explicit HostTier(uint64_t capacity_bytes);
  ~HostTier();
  HostTier(const HostTier&) = delete;
  HostTier& operator=(const HostTier&) = delete;

  // Calls `use(page)` under the shard's lock if the page is here (so it must be quick): a hit.
  template <typename Use>
  bool Lookup(const PageKey& key, Access access, Use use) {
    const std::byte* page = Pin(key, access);
    if (page == nullptr) return false;
    use(ConstPageBytes(page, kPageBytes));
    Unpin(key);
    return true;
  }

  // Copies a verified page in. A scan's page is taken only while there is free room.
  void Insert(const PageKey& key, ConstPageBytes page, Access access);
  void EraseSegment(uint64_t segment);

  struct Stats {
    uint64_t bytes = 0, capacity = 0, hits = 0, misses = 0;
  };
  Stats stats() const;

 private:
  class Shard;
  Shard& ShardOf(const PageKey& key) const;
  const std::byte* Pin(const PageKey& key, Access access);
  void Unpin(const PageKey& key);

  std::byte* arena_ = nullptr;  // one mapping, split among the shards
  uint64_t capacity_pages_ = 0;
  std::vector<std::unique_ptr<Shard>> shards_;
};

}  // namespace prefixd::storage
