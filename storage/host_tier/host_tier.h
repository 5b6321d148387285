// Bounds a cache of verified segment pages in host memory: one region per tenant (tier_region.h)
// over one budget. The tier grants memory in blocks of 2 MiB (less in a small tier) as it is
// needed: first free blocks; then, to a tenant below its share, a block of the tenant most above
// its own, whose memory really goes back to the system in between; otherwise a tenant's pages
// replace each other. So a tenant may use all of the tier while no other needs it, and always keeps
// its share. Blocks with pinned pages are never taken: they stay above the share until they are
// released.
//
// Thread-safety: all methods may be called concurrently. Regions may outlive the tier only in the
// hands of PagePins.
#pragma once

#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/memory_budget.h"
#include "prefixd/result.h"
#include "storage/host_tier/tier_region.h"

namespace prefixd::storage {

struct HostTierOptions {
  uint64_t capacity_bytes = 0;  // whole pages that fit; 0 caches nothing
  // Fractions of the capacity for tenants by name; the other tenants have equal parts of the rest.
  std::vector<std::pair<std::string, double>> shares;
  bool hugetlb = false;      // memory from the system's pool of huge pages, where there is one
  bool lock_memory = false;  // never swapped out
  BlockHook on_block;
  std::shared_ptr<MemoryBudget> memory;  // null: none is counted
};

class HostTier final : public TierBudget {
 public:
  // Creates a tier and takes no memory yet. kInvalidArgument: shares that are no fractions or
  // exceed the whole. kResourceExhausted: more than the system can address.
  static Result<std::unique_ptr<HostTier>> Create(const HostTierOptions& options);
  ~HostTier() override = default;

  // Returns the tenant's region and creates it on first use. When a region cannot be mapped, the
  // tier logs that and returns one that holds nothing: reading works without it.
  std::shared_ptr<TierRegion> ForTenant(std::string_view tenant);
  // Returns the tenant's region if there is one, else null.
  std::shared_ptr<TierRegion> Find(std::string_view tenant) const;
  // `pages`: of its file, at most; the fewer, the less is looked through.
  void EraseSegment(std::string_view tenant, uint64_t segment,
                    uint64_t pages = std::numeric_limits<uint64_t>::max());

  struct TenantStats {
    std::string tenant;
    uint64_t share_bytes = 0;
    TierRegion::Stats region;
  };
  struct Stats {
    uint64_t bytes = 0, memory_bytes = 0, capacity = 0, pinned_bytes = 0;
    uint64_t hits = 0, misses = 0, evictions = 0;
    PrefetchedPages ahead;
    std::string huge_pages;  // TierMemory::huge_pages
    std::vector<TenantStats> tenants;
  };
  Stats stats() const;

  bool Grow(TierRegion& region, Access access) override;
  uint64_t ShareBytes(const TierRegion& region) override;

 private:
  explicit HostTier(const HostTierOptions& options);
  Result<std::shared_ptr<TierRegion>> NewRegion(std::string_view tenant);
  uint64_t block_bytes() const { return kPageBytes << block_pages_log2_; }
  // A Division says how the tier is divided among the tenants that have memory or request some.
  struct Division {
    double rest = 1;      // fraction of the whole, for tenants without a share of their own
    uint64_t equals = 0;  // number of those tenants
  };
  // Gives a block back to the system, of the tenant with most: pages can be read again. False: all
  // have pins, or there is none.
  bool GiveBack(const std::string* tenant);
  // The methods below require mutex_.
  // Logs why the tier did not grow, once. Returns false.
  bool Refused(const Error& why);
  // Takes a block from the tenant most above its share.
  bool TakeFromOthers(const TierRegion& asks);
  Division Divide(const TierRegion& asks) const;
  void Count(const TierRegion& region, Division& division) const;
  uint64_t Share(const TierRegion& region, const Division& division) const;  // in blocks; 1 or more
  double ConfiguredShare(const std::string& tenant) const;                   // 0: none

  const HostTierOptions options_;
  uint32_t block_pages_log2_ = 0;
  uint64_t n_blocks_ = 0;
  bool hugetlb_ = false;
  std::string huge_pages_;

  mutable std::mutex mutex_;  // the budget lock
  uint64_t free_blocks_ = 0;
  uint64_t next_id_ = 1;
  bool warned_ = false;
  Stats gone_;  // counts of regions that are no more: the tier's only grow
  std::map<std::string, std::shared_ptr<TierRegion>, std::less<>> regions_;
  MemoryBudget::Giver giver_;
};

}  // namespace prefixd::storage
