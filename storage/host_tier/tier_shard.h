// Tracks which pages of a region are here, and which leaves next: an index and S3-FIFO queues (Yang
// et al., SOSP 2023) over a part of the region's keys. Newcomers wait in a small queue and reach
// the main one only when used again, so that pages read once leave first. Internal to the host
// tier.
//
// Thread-safety: everything requires `mutex`, except pins, which are taken under it and released
// without it.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "base/memory_budget.h"

namespace prefixd::storage {

struct PageKey {
  uint64_t segment = 0;  // the segment's sequence number, unique in a store
  uint64_t page = 0;
  bool operator==(const PageKey&) const = default;
};

// Scans neither raise a page's worth nor evict anything. Readers that keep the bytes themselves
// (kOwn, and kOwnLater behind all others) take the pages that are here and insert none. Prefetched
// pages (kPrefetch) are counted apart until a point read uses them. Background reading (rewriting,
// copying) leaves the tier alone.
enum class Access : uint8_t { kPoint, kScan, kOwn, kOwnLater, kPrefetch, kBackground };

inline constexpr uint32_t kNoFrame = UINT32_MAX;
inline constexpr uint64_t kExtentPages = 256;  // pages that one look into the index finds

// A TierFrame is one page's place in a region. The fields that pinning writes to come first, in
// eight bytes that one cache line holds.
struct TierFrame {
  std::atomic<uint32_t> pins{0};
  std::atomic<uint8_t> shard{0};  // 1 + the shard that holds a page here; 0: none
  uint8_t uses = 0;               // since it entered its queue
  bool in_main = false;
  bool ahead = false;                         // prefetched, and not used yet
  uint32_t next = kNoFrame, prev = kNoFrame;  // in its queue
  uint64_t since = 0;                         // when it came to the end of its queue
  PageKey key;
};

// PrefetchedPages counts prefetched pages: all, those that a point read used, and those that no
// read can use any more: they left unused, were here already, or found no room. The others are here
// still.
struct PrefetchedPages {
  uint64_t read = 0, used = 0, in_vain = 0;
  PrefetchedPages& operator+=(const PrefetchedPages& o) {
    read += o.read, used += o.used, in_vain += o.in_vain;
    return *this;
  }
};

// A TierBlock is a block of frames that comes and goes as a whole; frame numbers stay the same.
struct TierBlock {
  TierBlock(uint32_t first_frame, uint32_t n) : first(first_frame), frames(n) {}
  const uint32_t first;
  std::vector<TierFrame> frames;
  std::vector<uint32_t> free;      // guarded by the region's pool mutex
  std::atomic<uint32_t> hot{0};    // frames in main queues
  bool retiring = false;           // its free frames are not handed out
  std::atomic<bool> coming{true};  // its memory is being taken; it has no free frames yet
  MemoryCharge memory;
};

// TierFrames finds frames by number. A block's frames may be looked up while one of them is in use.
class TierFrames {
 public:
  TierFrames(uint32_t n_blocks, uint32_t block_pages_log2)
      : shift_(block_pages_log2), blocks_(n_blocks) {}
  TierFrame& operator[](uint32_t f) { return block_of(f).frames[f & (block_pages() - 1)]; }
  TierBlock& block_of(uint32_t f) { return *blocks_[f >> shift_]; }
  std::unique_ptr<TierBlock>& block(uint32_t b) { return blocks_[b]; }
  uint32_t n_blocks() const { return static_cast<uint32_t>(blocks_.size()); }
  uint32_t block_pages() const { return 1u << shift_; }

 private:
  const uint32_t shift_;
  std::vector<std::unique_ptr<TierBlock>> blocks_;
};

class TierShard {
 public:
  // `clock` counts the pages that come to the end of a queue, over all shards of a region.
  // index: counts the memory of the index.
  TierShard(TierFrames& frames, uint8_t number, std::atomic<uint64_t>& clock,
            MemoryCharge index = {})
      : frames_(frames), number_(number), clock_(clock), index_memory_(std::move(index)) {}

  // Pins those of `pages` (in one extent of `segment`) that are here and counts them as used; the
  // others are kNoFrame in `out`. Returns how many were prefetched and are used now for the first
  // time.
  uint64_t Pin(uint64_t segment, std::span<const uint64_t> pages, Access access,
               std::span<uint32_t> out);
  // Assigns `frame`, whose bytes are in place, to the page. A page that is here already stays where
  // it is. Returns the frame that holds the page; pins it if `pin` is set.
  uint32_t Add(const PageKey& key, uint32_t frame, Access access, bool pin);
  // Evicts the unpinned page that is worth least and returns its frame, or kNoFrame. `ghosts`
  // bounds how many early leavers are remembered, in pages.
  uint32_t EvictOne(uint64_t ghosts);
  // Evicts one certain page, if it is still here and not pinned.
  bool Evict(uint32_t frame);
  // Removes all pages of a segment, the pinned ones too (their bytes stay until they are unpinned).
  // `extents`: no more are here; a small segment is found without a look at all others.
  void EraseSegment(uint64_t segment, uint64_t extents, std::vector<uint32_t>& left);

  uint64_t pages() const { return small_.size + main_.size; }
  // Returns how many pages of one extent (pages from extent * kExtentPages on) are here.
  uint32_t PagesOf(uint64_t segment, uint64_t extent) const;

  // The clock time at which the page that EvictOne looks at first came to its queue: a queue of
  // newcomers, or else the main one. kNever: there is none. Needs no mutex, and may be a moment
  // old.
  static constexpr uint64_t kNever = UINT64_MAX;
  uint64_t oldest_newcomer() const { return oldest_newcomer_.load(std::memory_order_relaxed); }
  uint64_t oldest_main() const { return oldest_main_.load(std::memory_order_relaxed); }

  mutable std::mutex mutex;
  uint64_t hits = 0, misses = 0, evictions = 0;
  PrefetchedPages ahead;

 private:
  struct Queue {
    uint32_t head = kNoFrame, tail = kNoFrame;
    uint64_t size = 0;
  };
  struct Extent {
    std::array<uint32_t, kExtentPages> frames;
    uint32_t used = 0;
  };
  struct KeyHash {
    size_t operator()(const PageKey& key) const;
  };

  bool EvictsNewcomers() const {
    return small_.size > 0 && (small_.size * 10 >= pages() || main_.size == 0);
  }
  // A point read uses a prefetched page: the page ranks from now on as if that read had brought it.
  void UseFirst(uint32_t f);
  void Append(Queue& queue, uint32_t f);
  void Unlink(uint32_t f);
  void Remove(uint32_t f);
  void Remember(const PageKey& key, uint64_t ghosts);
  void Publish();
  void CountIndex();

  TierFrames& frames_;
  const uint8_t number_;
  std::atomic<uint64_t>& clock_;
  std::atomic<uint64_t> oldest_newcomer_{kNever}, oldest_main_{kNever};
  Queue small_, main_;
  std::unordered_map<PageKey, Extent, KeyHash> extents_;  // keyed by (segment, page / kExtentPages)
  MemoryCharge index_memory_;                             // of extents_
  std::unordered_set<uint64_t> ghosts_;                   // hashes of pages that left early
  std::deque<uint64_t> ghost_order_;
};

// Spreads keys over shards and hash tables.
uint64_t HashOf(const PageKey& key);

}  // namespace prefixd::storage
