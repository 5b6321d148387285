// One tenant's part of the host tier: verified pages in memory that local clients may map read-only
// and read in place. Frames freed are used again only by this tenant, and memory that goes to
// another is given back to the system first: nobody ever sees another tenant's bytes.
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

#include "prefixd/result.h"
#include "storage/segment/segment_format.h"
#include "storage/host_tier/tier_memory.h"
#include "storage/host_tier/tier_shard.h"

namespace prefixd::storage {

class TierRegion;

// Told of every block of memory: before its first use and after its last. For registering it with
// a device, say. Called from any thread, under the tier's budget lock: must not call the tier.
using BlockHook = std::function<void(std::span<std::byte> block, bool taken)>;

// Memory for regions comes from here; the HostTier is one.
class TierBudget {
 public:
  virtual ~TierBudget() = default;
  // Tries to give `region` one more block (TierRegion::AddBlock). A scan, and what is read ahead,
  // only gets what nobody has; others may take from a tenant above its share. False: no.
  virtual bool Grow(TierRegion& region, Access access) = 0;
  // Bytes this region may always have.
  virtual uint64_t ShareBytes(const TierRegion& region) = 0;
};

// Pages that stay what and where they are while this lives. Move-only; outlives the store's
// closing. Thread-safety: one thread at a time.
class PagePins {
 public:
  PagePins() = default;
  PagePins(PagePins&&) noexcept = default;
  PagePins& operator=(PagePins&& other) noexcept;
  ~PagePins() { Release(); }

  bool empty() const { return frames_.empty(); }
  // Null when nothing was ever pinned.
  const std::shared_ptr<TierRegion>& region() const { return region_; }
  void Release();

 private:
  friend class TierRegion;
  std::shared_ptr<TierRegion> region_;
  std::vector<uint32_t> frames_;
  uint64_t promised_ = 0;  // pages counted against the region's bound
};

class TierRegion : public std::enable_shared_from_this<TierRegion> {
 public:
  struct Options {
    std::string tenant;
    uint64_t id = 0;  // among the regions of a tier; never used again
    uint64_t blocks = 0;
    uint32_t block_pages_log2 = 0;
    bool hugetlb = false, lock_memory = false;
    BlockHook on_block;
  };
  // A region of no memory (blocks 0) holds nothing and refuses pins.
  static Result<std::shared_ptr<TierRegion>> Create(const Options& options, TierBudget* budget);
  ~TierRegion();

  const std::string& tenant() const { return options_.tenant; }
  uint64_t id() const { return options_.id; }
  // All of the region's addresses, most of them without memory.
  std::span<std::byte> bytes() const { return memory_ ? memory_->bytes() : std::span<std::byte>(); }
  const TierMemory* memory() const { return memory_ ? &*memory_ : nullptr; }

  // A page's bytes, valid while it is pinned.
  ConstPageBytes page(uint32_t frame) const {
    return ConstPageBytes(bytes().data() + uint64_t{frame} * kPageBytes, kPageBytes);
  }
  // Looks for `pages` of `segment` (ascending); those here are pinned: out[i] is a frame or
  // kNoFrame. Every frame must be given to Unpin; for moments only, so it counts against nothing.
  // Returns how many were read ahead and are used now for the first time.
  uint64_t Pin(uint64_t segment, std::span<const uint64_t> pages, Access access,
               std::span<uint32_t> out);
  void Unpin(std::span<const uint32_t> frames);  // kNoFrame is skipped

  // Copies a verified page in. A scan's page is taken only while there is free room; one read ahead
  // takes none from other tenants. False: it found no room.
  bool Insert(const PageKey& key, ConstPageBytes page, Access access);
  // `pages` from `first` on were read ahead and cannot be taken in.
  void NoteReadInVain(const PageKey& first, uint64_t pages);

  // For lasting pins: counts `pages` against the bound of half the region's share.
  // kResourceExhausted beyond it; kFailedPrecondition when the region has no memory at all.
  Result<PagePins> Promise(uint64_t pages);
  // As Pin, of what a promise was made for.
  uint64_t Pin(uint64_t segment, std::span<const uint64_t> pages, Access access,
               std::span<uint32_t> out, PagePins& pins);
  // Copies a verified page in, pinned. kResourceExhausted when every page here is pinned.
  Result<uint32_t> InsertPinned(const PageKey& key, ConstPageBytes page, PagePins& pins);

  // Pins for as long as a step takes: of as many pages as it likes, counted against nothing.
  PagePins PinsForAStep();
  // As InsertPinned; kNoFrame where that refuses.
  uint32_t TryInsertPinned(const PageKey& key, ConstPageBytes page, PagePins& pins);

  void EraseSegment(uint64_t segment);

  struct Stats {
    uint64_t bytes = 0;         // of pages held
    uint64_t memory_bytes = 0;  // of blocks taken
    uint64_t pinned_bytes = 0;  // lasting pins; a page pinned twice counts twice
    uint64_t hits = 0, misses = 0, evictions = 0;
    AheadPages ahead;
  };
  Stats stats() const;

  // For the budget, which calls one of them at a time.
  uint64_t blocks() const { return n_blocks_; }
  Status AddBlock();
  // Evicts a block's pages (of the blocks without pins, the one with the fewest pages that were
  // used again) and gives its memory back. False when every block holds pins.
  bool RemoveBlock();
  // Gives back blocks without pages.
  uint64_t RemoveEmptyBlocks();
  // A process that reads the region where no block is makes the kernel put zeros there: gives those
  // back.
  void GiveBackStray();

 private:
  friend class PagePins;
  explicit TierRegion(const Options& options, TierBudget* budget);
  TierShard& ShardOf(uint64_t segment, uint64_t page) const;
  // A frame that is nobody else's until it is added to a shard or freed; kNoFrame: no room.
  uint32_t AcquireFrame(Access access);
  size_t ShardThatGives() const;
  uint32_t TakeFree();
  void Free(std::span<const uint32_t> frames);
  // These need pool_mutex_.
  void FreeLocked(uint32_t frame);
  void SweepLimbo();
  bool Pinned(TierBlock& block) const;
  bool Retire(uint32_t index);
  void DropBlock(uint32_t index);
  std::span<std::byte> BlockBytes(uint32_t index) const;

  const Options options_;
  TierBudget* const budget_;
  std::optional<TierMemory> memory_;
  mutable TierFrames frames_;
  std::vector<std::unique_ptr<TierShard>> shards_;
  std::atomic<uint64_t> n_blocks_{0};
  std::atomic<uint64_t> pinned_pages_{0};
  std::atomic<uint64_t> clock_{0};  // of the shards
  std::atomic<bool> warned_of_lock_{false};
  uint32_t first_gap_ = 0;  // no block below it is missing; of the budget

  std::mutex pool_mutex_;
  std::vector<uint32_t> open_;   // blocks that may have free frames
  std::vector<uint32_t> limbo_;  // erased while pinned: free once they no longer are
};

}  // namespace prefixd::storage
