#include "storage/host_tier/tier_shard.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace prefixd::storage {
namespace {

constexpr uint8_t kMaxUses = 3;

PageKey ExtentOf(const PageKey& key) { return {key.segment, key.page / kExtentPages}; }

}  // namespace

uint64_t HashOf(const PageKey& key) {
  uint64_t h = key.segment * 0x9E3779B97F4A7C15ull + key.page;
  h = (h ^ (h >> 32)) * 0xD6E8FEB86659FD93ull;
  h = (h ^ (h >> 32)) * 0xD6E8FEB86659FD93ull;
  return h ^ (h >> 32);
}

size_t TierShard::KeyHash::operator()(const PageKey& key) const { return HashOf(key); }

uint64_t TierShard::Pin(uint64_t segment, std::span<const uint64_t> pages, Access access,
                        std::span<uint32_t> out) {
  uint64_t used_first = 0;
  const auto it = extents_.find(ExtentOf({segment, pages.front()}));
  // Frames lie in memory in the order in which they were taken: all are prefetched into the cache
  // before the first is written to, because a write must wait for its cache line and delays
  // everything behind.
  for (size_t i = 0; i < pages.size(); ++i) {
    out[i] = it == extents_.end() ? kNoFrame : it->second.frames[pages[i] % kExtentPages];
    if (out[i] != kNoFrame) __builtin_prefetch(&frames_[out[i]], /*rw=*/1);
  }
  for (const uint32_t f : out.first(pages.size())) {
    // A prefetch counts neither as hit nor as miss.
    if (access != Access::kPrefetch) ++(f == kNoFrame ? misses : hits);
    if (f == kNoFrame) continue;
    TierFrame& frame = frames_[f];
    if (access == Access::kPoint) {
      if (frame.ahead) {
        UseFirst(f);
        ++used_first;
      } else {
        frame.uses = std::min<uint8_t>(kMaxUses, frame.uses + 1);
      }
    }
    frame.pins.fetch_add(1, std::memory_order_relaxed);
  }
  ahead.used += used_first;
  if (used_first > 0) Publish();
  return used_first;
}

uint32_t TierShard::Add(const PageKey& key, uint32_t f, Access access, bool pin) {
  const auto [it, fresh] = extents_.try_emplace(ExtentOf(key));
  Extent& extent = it->second;
  if (fresh) {
    extent.frames.fill(kNoFrame);
    CountIndex();
  }
  uint32_t& slot = extent.frames[key.page % kExtentPages];
  if (slot == kNoFrame) {
    slot = f;
    ++extent.used;
    TierFrame& frame = frames_[f];
    frame.key = key;
    frame.uses = 0;
    frame.ahead = access == Access::kPrefetch;
    frame.shard.store(static_cast<uint8_t>(number_ + 1), std::memory_order_relaxed);
    const bool returning = access == Access::kPoint && ghosts_.erase(HashOf(key)) > 0;
    Append(returning ? main_ : small_, f);
  } else if (access == Access::kPrefetch) {
    ++ahead.in_vain;
  } else if (access == Access::kPoint && frames_[slot].ahead) {
    ++ahead.in_vain;  // it came while this read fetched it
    UseFirst(slot);
  }
  if (access == Access::kPrefetch) ++ahead.read;
  if (pin) frames_[slot].pins.fetch_add(1, std::memory_order_relaxed);
  Publish();
  return slot;
}

void TierShard::UseFirst(uint32_t f) {
  TierFrame& frame = frames_[f];
  frame.ahead = false;
  if (ghosts_.erase(HashOf(frame.key)) == 0 || frame.in_main) return;
  Unlink(f);
  Append(main_, f);
}

uint32_t TierShard::EvictOne(uint64_t ghosts) {
  // Every pass lowers a use count, finds a pin or frees a frame.
  for (uint64_t patience = pages() * (kMaxUses + 2); patience > 0; --patience) {
    const bool from_small = EvictsNewcomers();
    const uint32_t f = (from_small ? small_ : main_).head;
    TierFrame& frame = frames_[f];
    if (frame.uses > 0 || frame.pins.load(std::memory_order_acquire) > 0) {
      // The page is in use: it moves up from the small queue, or stays with one life less.
      frame.uses = from_small || frame.uses == 0 ? 0 : frame.uses - 1;
      Unlink(f);
      Append(main_, f);
      continue;
    }
    if (from_small && !frame.ahead) Remember(frame.key, ghosts);
    Remove(f);
    ++evictions;
    Publish();
    return f;
  }
  Publish();
  return kNoFrame;
}

bool TierShard::Evict(uint32_t f) {
  TierFrame& frame = frames_[f];
  if (frame.shard.load(std::memory_order_relaxed) != number_ + 1) return false;
  if (frame.pins.load(std::memory_order_acquire) > 0) return false;
  Remove(f);
  ++evictions;
  Publish();
  return true;
}

uint32_t TierShard::PagesOf(uint64_t segment, uint64_t extent) const {
  const auto it = extents_.find({segment, extent});
  return it == extents_.end() ? 0 : it->second.used;
}

void TierShard::EraseSegment(uint64_t segment, uint64_t extents, std::vector<uint32_t>& left) {
  const auto erase = [&](const Extent extent) {  // a copy: the last Remove erases the entry
    for (const uint32_t f : extent.frames) {
      if (f == kNoFrame) continue;
      Remove(f);
      left.push_back(f);
    }
  };
  if (extents <= extents_.size()) {
    for (uint64_t i = 0; i < extents; ++i) {
      const auto it = extents_.find({segment, i});
      if (it != extents_.end()) erase(it->second);
    }
  } else {
    for (auto it = extents_.begin(); it != extents_.end();) {
      const auto at = it++;
      if (at->first.segment == segment) erase(at->second);
    }
  }
  Publish();
}

void TierShard::CountIndex() {
  constexpr uint64_t kNodeBytes = 64;  // of the hash table, beside the extent
  index_memory_.Set(extents_.size() * (sizeof(Extent) + kNodeBytes));
}

void TierShard::Publish() {
  const bool newcomers = EvictsNewcomers();
  oldest_newcomer_.store(newcomers ? frames_[small_.head].since : kNever,
                         std::memory_order_relaxed);
  oldest_main_.store(!newcomers && main_.size > 0 ? frames_[main_.head].since : kNever,
                     std::memory_order_relaxed);
}

void TierShard::Append(Queue& queue, uint32_t f) {
  TierFrame& frame = frames_[f];
  frame.in_main = &queue == &main_;
  if (frame.in_main) frames_.block_of(f).hot.fetch_add(1, std::memory_order_relaxed);
  frame.prev = queue.tail;
  frame.next = kNoFrame;
  (queue.tail == kNoFrame ? queue.head : frames_[queue.tail].next) = f;
  queue.tail = f;
  ++queue.size;
  frame.since = clock_.fetch_add(1, std::memory_order_relaxed);
}

void TierShard::Unlink(uint32_t f) {
  TierFrame& frame = frames_[f];
  Queue& queue = frame.in_main ? main_ : small_;
  if (frame.in_main) frames_.block_of(f).hot.fetch_sub(1, std::memory_order_relaxed);
  (frame.prev == kNoFrame ? queue.head : frames_[frame.prev].next) = frame.next;
  (frame.next == kNoFrame ? queue.tail : frames_[frame.next].prev) = frame.prev;
  --queue.size;
}

void TierShard::Remove(uint32_t f) {
  TierFrame& frame = frames_[f];
  if (std::exchange(frame.ahead, false)) ++ahead.in_vain;
  Unlink(f);
  const auto it = extents_.find(ExtentOf(frame.key));
  PREFIXD_CHECK(it != extents_.end() && it->second.used > 0, f, frame.key.segment, frame.key.page);
  it->second.frames[frame.key.page % kExtentPages] = kNoFrame;
  if (--it->second.used == 0) {
    extents_.erase(it);
    CountIndex();
  }
  frame.shard.store(0, std::memory_order_relaxed);
}

void TierShard::Remember(const PageKey& key, uint64_t ghosts) {
  const uint64_t hash = HashOf(key);
  if (!ghosts_.insert(hash).second) return;
  ghost_order_.push_back(hash);
  while (ghost_order_.size() > ghosts) {
    ghosts_.erase(ghost_order_.front());
    ghost_order_.pop_front();
  }
}

}  // namespace prefixd::storage
