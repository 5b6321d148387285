// Manages one tenant's part of the host tier: verified pages in memory that local clients may map
// read-only and read in place. Only this tenant uses its freed frames again, and memory that goes
// to another tenant is given back to the system first: no tenant ever sees another's bytes.
//
// Thread-safety: all methods may be called concurrently, except where they say otherwise. Locks are
// taken in the order: the tier's budget, a shard, the pool.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/memory_budget.h"
#include "prefixd/result.h"
#include "storage/host_tier/tier_memory.h"
#include "storage/host_tier/tier_shard.h"
#include "storage/segment/segment_format.h"

namespace prefixd::storage {

class TierRegion;

// The tier calls a BlockHook for every block of memory, before its first use and after its last,
// for instance to register it with a device. It is called from any thread, under the tier's budget
// lock: it must not call the tier.
using BlockHook = std::function<void(std::span<std::byte> block, bool taken)>;

// A TierBudget grants memory to regions; the HostTier is one.
class TierBudget {
 public:
  virtual ~TierBudget() = default;
  // Tries to give `region` one more block (TierRegion::AddBlock). Scans and prefetch only get free
  // blocks; others may take from a tenant above its share. False: no block was given.
  virtual bool Grow(TierRegion& region, Access access) = 0;
  // Returns the bytes that this region may always have.
  virtual uint64_t ShareBytes(const TierRegion& region) = 0;
};

// PagePins keep pages in place and unchanged while they live. Move-only; outlive the store's
// closing. Thread-safety: one thread at a time.
class PagePins {
 public:
  PagePins() = default;
  PagePins(PagePins&&) noexcept = default;
  PagePins& operator=(PagePins&& other) noexcept;
  ~PagePins() { Release(); }

  bool empty() const { return frames_.empty(); }
  // Null when no page was ever pinned.
  const std::shared_ptr<TierRegion>& region() const { return region_; }
  void Release();

 private:
  friend class TierRegion;
  std::shared_ptr<TierRegion> region_;
  std::vector<uint32_t> frames_;
  uint64_t promised_ = 0;  // in pages, counted against the region's bound
};

class TierRegion : public std::enable_shared_from_this<TierRegion> {
 public:
  struct Options {
    std::string tenant;
    uint64_t id = 0;  // unique among the regions of a tier; never used again
    uint64_t blocks = 0;
    uint32_t block_pages_log2 = 0;
    bool hugetlb = false, lock_memory = false;
    BlockHook on_block;
    MemoryAccount memory;
  };
  // A region of no memory (blocks 0) holds nothing and refuses pins.
  static Result<std::shared_ptr<TierRegion>> Create(const Options& options, TierBudget* budget);
  ~TierRegion();

  const std::string& tenant() const { return options_.tenant; }
  uint64_t id() const { return options_.id; }
  // Returns all of the region's addresses, most of them without memory.
  std::span<std::byte> bytes() const { return memory_ ? memory_->bytes() : std::span<std::byte>(); }
  const TierMemory* memory() const { return memory_ ? &*memory_ : nullptr; }

  // Returns a page's bytes, valid while it is pinned.
  ConstPageBytes page(uint32_t frame) const {
    return ConstPageBytes(bytes().data() + uint64_t{frame} * kPageBytes, kPageBytes);
  }
  // Looks for `pages` of `segment` (ascending) and pins those that are here: out[i] is a frame or
  // kNoFrame. Every frame must be given to Unpin; the pins are short-lived, so they count against
  // no bound. Returns how many pages were prefetched and are used now for the first time.
  uint64_t Pin(uint64_t segment, std::span<const uint64_t> pages, Access access,
               std::span<uint32_t> out);
  void Unpin(std::span<const uint32_t> frames);  // kNoFrame is skipped

  // Copies a verified page in. A scan's page is taken only while there is free room; a prefetched
  // one takes no room from other tenants. False: it found no room.
  bool Insert(const PageKey& key, ConstPageBytes page, Access access);
  // Notes that `pages` from `first` on were prefetched and cannot be taken in.
  void NoteReadInVain(const PageKey& first, uint64_t pages);

  // Prepares lasting pins: counts `pages` against the bound of half the region's share.
  // kResourceExhausted beyond it; kFailedPrecondition when the region has no memory at all.
  Result<PagePins> Promise(uint64_t pages);
  // Pins like the Pin above, against the promise in `pins`.
  uint64_t Pin(uint64_t segment, std::span<const uint64_t> pages, Access access,
               std::span<uint32_t> out, PagePins& pins);
  // Copies a verified page in and pins it. kResourceExhausted when every page here is pinned.
  Result<uint32_t> InsertPinned(const PageKey& key, ConstPageBytes page, PagePins& pins);

  // Returns pins for the duration of a step: any number of pages, counted against no bound.
  PagePins PinsForAStep();
  // Inserts like InsertPinned; returns kNoFrame where that refuses.
  uint32_t TryInsertPinned(const PageKey& key, ConstPageBytes page, PagePins& pins);

  void EraseSegment(uint64_t segment, uint64_t pages);

  // Returns the part of pages [begin, end) of a segment that is here, from 0 to 1. Of a large one
  // it looks at kExtentsLookedAt extents, evenly spread. Counts as no use.
  static constexpr uint64_t kExtentsLookedAt = 512;
  double ShareOf(uint64_t segment, uint64_t begin, uint64_t end) const;

  struct Stats {
    uint64_t bytes = 0;         // bytes of pages held
    uint64_t memory_bytes = 0;  // bytes of blocks taken
    uint64_t pinned_bytes = 0;  // lasting pins; a page pinned twice counts twice
    uint64_t hits = 0, misses = 0, evictions = 0;
    PrefetchedPages ahead;
  };
  Stats stats() const;

  // The budget calls these, one at a time, but for FillBlock.
  uint64_t blocks() const { return n_blocks_; }
  // Takes what a block costs; nullopt: the budget of memory has no room.
  std::optional<MemoryCharge> TakeBlockMemory() const;
  // Adds a block whose memory is still to be taken, and returns its index. kInternal: the region is
  // full.
  Result<uint32_t> AddBlock(MemoryCharge memory);
  // Takes the memory of the block that was added and hands out its frames; the time of clearing it.
  // When that fails, the block is to be dropped.
  Status FillBlock(uint32_t index);
  void DropBlock(uint32_t index);
  // Evicts a block's pages (of the blocks without pins, the one with the fewest reused pages) and
  // gives its memory back. False when every block holds pins.
  bool RemoveBlock();
  // Gives back blocks without pages.
  uint64_t RemoveEmptyBlocks();
  // Gives back the zero pages that the kernel creates when a process reads the region where no
  // block is.
  void GiveBackStray();

 private:
  friend class PagePins;
  explicit TierRegion(const Options& options, TierBudget* budget);
  TierShard& ShardOf(uint64_t segment, uint64_t page) const;
  // Returns a frame that the caller owns until it adds it to a shard or frees it; kNoFrame: no
  // room.
  uint32_t AcquireFrame(Access access);
  size_t ShardThatGives() const;
  uint32_t TakeFree();
  void Free(std::span<const uint32_t> frames);
  // The methods below require pool_mutex_.
  void FreeLocked(uint32_t frame);
  void SweepLimbo();
  bool Pinned(TierBlock& block) const;
  bool Retire(uint32_t index);
  std::span<std::byte> BlockBytes(uint32_t index) const;

  const Options options_;
  TierBudget* const budget_;
  std::optional<TierMemory> memory_;
  mutable TierFrames frames_;
  std::vector<std::unique_ptr<TierShard>> shards_;
  std::atomic<uint64_t> n_blocks_{0};
  std::atomic<uint64_t> pinned_pages_{0};
  std::atomic<uint64_t> clock_{0};  // shared by the shards
  std::atomic<bool> warned_of_lock_{false};
  uint32_t first_gap_ = 0;  // no block below it is missing; only under the budget's lock

  std::mutex pool_mutex_;
  std::vector<uint32_t> open_;   // blocks that may have free frames
  std::vector<uint32_t> limbo_;  // erased while pinned: free once they no longer are
};

}  // namespace prefixd::storage
