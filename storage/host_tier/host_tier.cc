#include "storage/host_tier/host_tier.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "base/check.h"
#include "storage/io/errors.h"

namespace prefixd::storage {
namespace {

constexpr uint64_t kBlockPages = (2ull << 20) / kPageBytes;
constexpr uint64_t kMinBlocks = 32;  // for a tier too small for blocks of 2 MiB

}  // namespace

Result<std::unique_ptr<HostTier>> HostTier::Create(const HostTierOptions& options) {
  double sum = 0;
  for (const auto& [tenant, share] : options.shares) {
    if (!(share > 0 && share <= 1)) {
      return InvalidArgument("the host tier share of tenant '" + tenant + "' must be above 0 and " +
                             "at most 1, not " + std::to_string(share));
    }
    sum += share;
  }
  if (sum > 1 + 1e-9) {
    return InvalidArgument("the host tier shares of tenants add up to " + std::to_string(sum) +
                           "; they may be 1 at most");
  }
  std::unique_ptr<HostTier> tier(new HostTier(options));
  if (tier->n_blocks_ == 0) return tier;
  if (tier->n_blocks_ << tier->block_pages_log2_ >= kNoFrame) {
    return Error{Code::kResourceExhausted,
                 "a host tier of " + std::to_string(options.capacity_bytes) +
                     " bytes is more than prefixd can address (16 TiB); choose a smaller one"};
  }
  // The test mapping reports a missing pool here rather than when the first tenant comes.
  if (options.hugetlb) {
    tier->hugetlb_ = true;
    auto probe = TierMemory::Create(tier->n_blocks_ * tier->block_bytes(), true);
    Status taken = probe.ok() ? probe->Take(0, tier->block_bytes()) : Status(probe.error());
    if (!taken.ok()) {
      LogWarning(taken.error().message +
                 "; the host tier uses ordinary pages (see vm.nr_hugepages)");
      tier->hugetlb_ = false;
    }
  }
  auto memory = TierMemory::Create(tier->n_blocks_ * tier->block_bytes(), tier->hugetlb_);
  if (!memory.ok()) {
    return Error{memory.error().code, memory.error().message + "; choose a smaller host tier"};
  }
  tier->huge_pages_ = memory->huge_pages();
  if (options.memory) {
    tier->giver_ = options.memory->OnShortage(
        [t = tier.get()](uint64_t, const std::string* tenant) { return t->GiveBack(tenant); });
  }
  return tier;
}

HostTier::HostTier(const HostTierOptions& options) : options_(options) {
  const uint64_t pages = options.capacity_bytes / kPageBytes;
  const uint64_t wanted = options.hugetlb ? kBlockPages : pages / kMinBlocks;
  const uint64_t block_pages = std::bit_floor(std::clamp<uint64_t>(wanted, 1, kBlockPages));
  block_pages_log2_ = static_cast<uint32_t>(std::countr_zero(block_pages));
  n_blocks_ = free_blocks_ = pages / block_pages;
}

std::shared_ptr<TierRegion> HostTier::ForTenant(std::string_view tenant) {
  std::lock_guard lock(mutex_);
  if (const auto it = regions_.find(tenant); it != regions_.end()) return it->second;
  // A region without memory that no reader holds is only addresses and a descriptor.
  std::erase_if(regions_, [this](const auto& entry) {
    if (entry.second.use_count() > 1 || entry.second->blocks() > 0) return false;
    const TierRegion::Stats s = entry.second->stats();
    gone_.hits += s.hits;
    gone_.misses += s.misses;
    gone_.evictions += s.evictions;
    gone_.ahead += s.ahead;
    return true;
  });
  auto region = NewRegion(tenant);
  if (!region.ok() && !std::exchange(warned_, true)) LogWarning(region.error().message);
  if (!region.ok()) region = TierRegion::Create({.tenant = std::string(tenant)}, this);
  regions_.emplace(tenant, *region);
  return *region;
}

std::shared_ptr<TierRegion> HostTier::Find(std::string_view tenant) const {
  std::lock_guard lock(mutex_);
  const auto it = regions_.find(tenant);
  return it == regions_.end() ? nullptr : it->second;
}

Result<std::shared_ptr<TierRegion>> HostTier::NewRegion(std::string_view tenant) {
  return TierRegion::Create(
      {.tenant = std::string(tenant),
       .id = next_id_++,
       .blocks = n_blocks_,
       .block_pages_log2 = block_pages_log2_,
       .hugetlb = hugetlb_,
       .lock_memory = options_.lock_memory,
       .on_block = options_.on_block,
       .memory = options_.memory ? options_.memory->Of(tenant) : MemoryAccount()},
      this);
}

void HostTier::EraseSegment(std::string_view tenant, uint64_t segment, uint64_t pages) {
  std::lock_guard lock(mutex_);
  const auto it = regions_.find(tenant);
  if (it == regions_.end()) return;
  it->second->EraseSegment(segment, pages);
  free_blocks_ += it->second->RemoveEmptyBlocks();
}

double HostTier::ConfiguredShare(const std::string& tenant) const {
  const auto it = std::find_if(options_.shares.begin(), options_.shares.end(),
                               [&](const auto& share) { return share.first == tenant; });
  return it == options_.shares.end() ? 0 : it->second;
}

void HostTier::Count(const TierRegion& region, Division& division) const {
  const double configured = ConfiguredShare(region.tenant());
  division.rest -= configured;
  division.equals += configured == 0;
}

HostTier::Division HostTier::Divide(const TierRegion& asks) const {
  Division division;
  for (const auto& [tenant, region] : regions_) {
    if (region->blocks() > 0 || region.get() == &asks) Count(*region, division);
  }
  return division;
}

uint64_t HostTier::Share(const TierRegion& region, const Division& division) const {
  double fraction = ConfiguredShare(region.tenant());
  if (fraction == 0) {
    fraction = std::max(division.rest, 0.0) / double(std::max<uint64_t>(division.equals, 1));
  }
  // The rounding term makes a tenth and nine tenths the whole, whatever their binary fractions are.
  return std::max<uint64_t>(1, static_cast<uint64_t>(double(n_blocks_) * fraction + 1e-6));
}

uint64_t HostTier::ShareBytes(const TierRegion& region) {
  std::lock_guard lock(mutex_);
  return Share(region, Divide(region)) * block_bytes();
}

bool HostTier::TakeFromOthers(const TierRegion& asks) {
  const Division division = Divide(asks);
  if (asks.blocks() >= Share(asks, division)) return false;
  // The tenant most above its share, in blocks, gives first; the next one if all of its blocks
  // hold pins.
  std::vector<std::pair<uint64_t, TierRegion*>> above;
  for (const auto& [tenant, other] : regions_) {
    const uint64_t share = Share(*other, division);
    if (other.get() != &asks && other->blocks() > share) {
      above.emplace_back(other->blocks() - share, other.get());
    }
  }
  std::sort(above.rbegin(), above.rend());
  const bool took = std::any_of(above.begin(), above.end(),
                                [](const auto& other) { return other.second->RemoveBlock(); });
  free_blocks_ += took;
  return took;
}

bool HostTier::Grow(TierRegion& region, Access access) {
  uint32_t block = 0;
  {
    std::lock_guard lock(mutex_);
    auto memory = region.TakeBlockMemory();
    if (free_blocks_ == 0 || !memory) {
      if (access == Access::kScan || access == Access::kPrefetch) return false;
      if (!TakeFromOthers(region)) return false;
      if (!memory) memory = region.TakeBlockMemory();
      if (!memory) return false;
    }
    region.GiveBackStray();
    const Result<uint32_t> added = region.AddBlock(*std::move(memory));
    if (!added.ok()) return Refused(added.error());
    block = *added;
    PREFIXD_CHECK(free_blocks_ > 0);
    --free_blocks_;
  }
  // The kernel clears the memory here, by as many threads as want some: no tenant waits for
  // another's.
  const Status filled = region.FillBlock(block);
  if (filled.ok()) return true;
  std::lock_guard lock(mutex_);
  region.DropBlock(block);
  ++free_blocks_;
  return Refused(filled.error());
}

bool HostTier::Refused(const Error& why) {
  if (!std::exchange(warned_, true)) LogWarning(why.message);
  return false;
}

bool HostTier::GiveBack(const std::string* tenant) {
  if (tenant) return false;  // a tenant's share of the budget does not count the tier
  std::lock_guard lock(mutex_);
  std::vector<std::pair<uint64_t, TierRegion*>> most;
  for (const auto& [name, region] : regions_) {
    if (region->blocks() > 0) most.emplace_back(region->blocks(), region.get());
  }
  std::sort(most.rbegin(), most.rend());
  const bool gave = std::any_of(most.begin(), most.end(),
                                [](const auto& region) { return region.second->RemoveBlock(); });
  free_blocks_ += gave;
  return gave;
}

HostTier::Stats HostTier::stats() const {
  std::lock_guard lock(mutex_);
  Stats out = gone_;
  out.capacity = n_blocks_ * block_bytes();
  out.huge_pages = huge_pages_;
  Division division;
  for (const auto& [tenant, region] : regions_) {
    if (region->blocks() > 0) Count(*region, division);
  }
  for (const auto& [tenant, region] : regions_) {
    region->GiveBackStray();
    const TierRegion::Stats s = region->stats();
    out.bytes += s.bytes;
    out.memory_bytes += s.memory_bytes;
    out.pinned_bytes += s.pinned_bytes;
    out.hits += s.hits;
    out.misses += s.misses;
    out.evictions += s.evictions;
    out.ahead += s.ahead;
    Division with = division;
    if (region->blocks() == 0) Count(*region, with);
    out.tenants.push_back({tenant, Share(*region, with) * block_bytes(), s});
  }
  return out;
}

}  // namespace prefixd::storage
