#include "storage/host_tier/tier_region.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/check.h"
#include "storage/io/errors.h"

namespace prefixd::storage {
namespace {

constexpr uint64_t kMaxShards = 16;
// A shard holds several extents, so that pages that come together spread over all shards.
constexpr uint64_t kMinPagesPerShard = 16 * kExtentPages;

}  // namespace

PagePins& PagePins::operator=(PagePins&& other) noexcept {
  if (this != &other) {
    Release();
    region_ = std::move(other.region_);
    frames_ = std::exchange(other.frames_, {});
    promised_ = std::exchange(other.promised_, 0);
  }
  return *this;
}

void PagePins::Release() {
  if (!region_) return;
  region_->Unpin(frames_);
  const uint64_t before = region_->pinned_pages_.fetch_sub(promised_, std::memory_order_relaxed);
  PREFIXD_CHECK(before >= promised_, before, promised_);
  frames_.clear();
  promised_ = 0;
  region_.reset();
}

Result<std::shared_ptr<TierRegion>> TierRegion::Create(const Options& options, TierBudget* budget) {
  std::shared_ptr<TierRegion> region(new TierRegion(options, budget));
  if (options.blocks == 0) return region;
  const uint64_t pages = options.blocks << options.block_pages_log2;
  PREFIXD_ASSIGN(TierMemory memory, TierMemory::Create(pages * kPageBytes, options.hugetlb));
  region->memory_.emplace(std::move(memory));
  const uint64_t n = std::clamp<uint64_t>(pages / kMinPagesPerShard, 1, kMaxShards);
  for (uint64_t i = 0; i < n; ++i) {
    region->shards_.push_back(
        std::make_unique<TierShard>(region->frames_, static_cast<uint8_t>(i), region->clock_,
                                    options.memory.Charge(MemoryKind::kHostTier)));
  }
  return region;
}

TierRegion::TierRegion(const Options& options, TierBudget* budget)
    : options_(options),
      budget_(budget),
      frames_(static_cast<uint32_t>(options.blocks), options.block_pages_log2) {}

TierRegion::~TierRegion() {
  if (!options_.on_block) return;
  for (uint32_t i = 0; i < frames_.n_blocks(); ++i) {
    if (frames_.block(i)) options_.on_block(BlockBytes(i), false);
  }
}

TierShard& TierRegion::ShardOf(uint64_t segment, uint64_t page) const {
  return *shards_[(HashOf({segment, page / kExtentPages}) >> 40) % shards_.size()];
}

// ---- pages --------------------------------------------------------------------------------------

uint64_t TierRegion::Pin(uint64_t segment, std::span<const uint64_t> pages, Access access,
                         std::span<uint32_t> out) {
  if (shards_.empty()) {
    std::fill(out.begin(), out.end(), kNoFrame);
    return 0;
  }
  uint64_t used_first = 0;
  for (size_t i = 0; i < pages.size();) {
    size_t n = 1;
    while (i + n < pages.size() && pages[i + n] / kExtentPages == pages[i] / kExtentPages) ++n;
    TierShard& shard = ShardOf(segment, pages[i]);
    std::lock_guard lock(shard.mutex);
    used_first += shard.Pin(segment, pages.subspan(i, n), access, out.subspan(i, n));
    i += n;
  }
  return used_first;
}

double TierRegion::ShareOf(uint64_t segment, uint64_t begin, uint64_t end) const {
  if (shards_.empty() || begin >= end) return 0;
  const uint64_t first = begin / kExtentPages, extents = (end - 1) / kExtentPages + 1 - first;
  const uint64_t looks = std::min(extents, kExtentsLookedAt);
  uint64_t looked_at = 0, here = 0;
  for (uint64_t i = 0; i < looks; ++i) {
    const uint64_t extent = first + i * extents / looks;
    const uint64_t from = std::max(begin, extent * kExtentPages);
    const uint64_t pages = std::min(end, (extent + 1) * kExtentPages) - from;
    const TierShard& shard = ShardOf(segment, from);
    std::lock_guard lock(shard.mutex);
    looked_at += pages;
    here += std::min<uint64_t>(pages, shard.PagesOf(segment, extent));
  }
  return double(here) / double(looked_at);
}

void TierRegion::Unpin(std::span<const uint32_t> frames) {
  for (const uint32_t f : frames) {
    if (f == kNoFrame) continue;
    const uint32_t before = frames_[f].pins.fetch_sub(1, std::memory_order_release);
    PREFIXD_CHECK(before > 0, f);
  }
}

bool TierRegion::Insert(const PageKey& key, ConstPageBytes page, Access access) {
  if (shards_.empty()) return false;
  const uint32_t f = AcquireFrame(access);
  TierShard& shard = ShardOf(key.segment, key.page);
  if (f == kNoFrame) {
    if (access == Access::kPrefetch) NoteReadInVain(key, 1);
    return false;
  }
  std::memcpy(bytes().data() + uint64_t{f} * kPageBytes, page.data(), kPageBytes);
  uint32_t holder = kNoFrame;
  {
    std::lock_guard lock(shard.mutex);
    holder = shard.Add(key, f, access, false);
  }
  if (holder != f) Free({&f, 1});
  return true;
}

void TierRegion::NoteReadInVain(const PageKey& first, uint64_t pages) {
  if (shards_.empty()) return;
  TierShard& shard = ShardOf(first.segment, first.page);
  std::lock_guard lock(shard.mutex);
  shard.ahead.read += pages;
  shard.ahead.in_vain += pages;
}

Result<PagePins> TierRegion::Promise(uint64_t pages) {
  if (shards_.empty()) {
    return Error{Code::kFailedPrecondition,
                 "the host tier holds nothing (its size is 0, or it could not be mapped), so rows "
                 "cannot be read in place; use ReadRows"};
  }
  const uint64_t share = budget_->ShareBytes(*this);
  const uint64_t bound = share / kPageBytes / 2;
  const uint64_t before = pinned_pages_.fetch_add(pages, std::memory_order_relaxed);
  if (before + pages > bound) {
    pinned_pages_.fetch_sub(pages, std::memory_order_relaxed);
    return Error{
        Code::kResourceExhausted,
        "tenant '" + tenant() + "' would hold " + std::to_string((before + pages) * kPageBytes) +
            " bytes of the host tier in place and may hold " + std::to_string(bound * kPageBytes) +
            " (half its share); release rows held in place, hold fewer, or use ReadRows"};
  }
  PagePins pins;
  pins.region_ = shared_from_this();
  pins.promised_ = pages;
  pins.frames_.reserve(pages);
  return pins;
}

uint64_t TierRegion::Pin(uint64_t segment, std::span<const uint64_t> pages, Access access,
                         std::span<uint32_t> out, PagePins& pins) {
  const uint64_t used_first = Pin(segment, pages, access, out);
  for (const uint32_t f : out) {
    if (f != kNoFrame) pins.frames_.push_back(f);
  }
  return used_first;
}

Result<uint32_t> TierRegion::InsertPinned(const PageKey& key, ConstPageBytes page, PagePins& pins) {
  if (const uint32_t f = TryInsertPinned(key, page, pins); f != kNoFrame) return f;
  return Error{Code::kResourceExhausted,
               "the host tier has no room for another page of tenant '" + tenant() +
                   "': what it holds is in use; release rows held in place or use ReadRows"};
}

PagePins TierRegion::PinsForAStep() {
  PagePins pins;
  pins.region_ = shared_from_this();
  return pins;
}

uint32_t TierRegion::TryInsertPinned(const PageKey& key, ConstPageBytes page, PagePins& pins) {
  if (shards_.empty()) return kNoFrame;
  const uint32_t f = AcquireFrame(Access::kPoint);
  if (f == kNoFrame) return kNoFrame;
  std::memcpy(bytes().data() + uint64_t{f} * kPageBytes, page.data(), kPageBytes);
  TierShard& shard = ShardOf(key.segment, key.page);
  uint32_t holder = kNoFrame;
  {
    std::lock_guard lock(shard.mutex);
    holder = shard.Add(key, f, Access::kPoint, true);
  }
  pins.frames_.push_back(holder);
  if (holder != f) Free({&f, 1});
  return holder;
}

void TierRegion::EraseSegment(uint64_t segment, uint64_t pages) {
  const uint64_t extents = pages / kExtentPages + 1;
  for (const auto& shard : shards_) {
    std::vector<uint32_t> left;
    {
      std::lock_guard lock(shard->mutex);
      shard->EraseSegment(segment, extents, left);
    }
    std::lock_guard lock(pool_mutex_);
    for (const uint32_t f : left) {
      // The index does not hold the frame any more, so no reader can pin it anew.
      if (frames_[f].pins.load(std::memory_order_acquire) > 0) {
        limbo_.push_back(f);
      } else {
        FreeLocked(f);
      }
    }
  }
}

TierRegion::Stats TierRegion::stats() const {
  Stats out;
  out.memory_bytes = n_blocks_ * frames_.block_pages() * kPageBytes;
  out.pinned_bytes = pinned_pages_.load(std::memory_order_relaxed) * kPageBytes;
  for (const auto& shard : shards_) {
    std::lock_guard lock(shard->mutex);
    out.bytes += shard->pages() * kPageBytes;
    out.hits += shard->hits;
    out.misses += shard->misses;
    out.evictions += shard->evictions;
    out.ahead += shard->ahead;
  }
  return out;
}

// ---- frames -------------------------------------------------------------------------------------

uint32_t TierRegion::AcquireFrame(Access access) {
  uint32_t f = TakeFree();
  while (f == kNoFrame && budget_->Grow(*this, access)) f = TakeFree();
  if (f != kNoFrame || access == Access::kScan) return f;
  const size_t n = shards_.size(), first = ShardThatGives();
  // All shards together remember half as many pages again as the region has: a returning page must
  // be known even where a shard is smaller than its share of the use.
  const uint64_t ghosts = n_blocks_ * frames_.block_pages() * 3 / 2 / n;
  for (size_t i = 0; i < n && f == kNoFrame; ++i) {
    TierShard& shard = *shards_[(first + i) % n];
    std::lock_guard lock(shard.mutex);
    f = shard.EvictOne(ghosts);
  }
  return f;
}

// Returns the shard with the oldest newcomer; where all shards hold main-queue pages alone, the one
// whose oldest has waited longest. Without this choice a shard would keep the size that its first
// pages gave it, too small for later pages.
size_t TierRegion::ShardThatGives() const {
  size_t newcomer = 0, main = 0;
  for (size_t s = 1; s < shards_.size(); ++s) {
    if (shards_[s]->oldest_newcomer() < shards_[newcomer]->oldest_newcomer()) newcomer = s;
    if (shards_[s]->oldest_main() < shards_[main]->oldest_main()) main = s;
  }
  return shards_[newcomer]->oldest_newcomer() != TierShard::kNever ? newcomer : main;
}

uint32_t TierRegion::TakeFree() {
  std::lock_guard lock(pool_mutex_);
  for (int pass = 0; pass < 2; ++pass) {
    while (!open_.empty()) {
      TierBlock& block = *frames_.block(open_.back());
      if (!block.free.empty() && !block.retiring) {
        const uint32_t f = block.free.back();
        block.free.pop_back();
        return f;
      }
      open_.pop_back();
    }
    SweepLimbo();
  }
  return kNoFrame;
}

void TierRegion::SweepLimbo() {
  std::erase_if(limbo_, [&](uint32_t f) {
    if (frames_[f].pins.load(std::memory_order_acquire) > 0) return false;
    FreeLocked(f);
    return true;
  });
}

void TierRegion::Free(std::span<const uint32_t> frames) {
  std::lock_guard lock(pool_mutex_);
  for (const uint32_t f : frames) FreeLocked(f);
}

void TierRegion::FreeLocked(uint32_t f) {
  TierBlock& block = frames_.block_of(f);
  PREFIXD_CHECK(block.free.size() < block.frames.size(), f, block.first);  // freed twice
  block.free.push_back(f);
  if (block.free.size() == 1 && !block.retiring)
    open_.push_back(block.first / frames_.block_pages());
}

}  // namespace prefixd::storage
