#include "storage/host_tier.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <mutex>
#include <new>
#include <unordered_map>

namespace prefixd::storage {
namespace {

constexpr uint8_t kMaxUses = 3;

uint64_t Mix(const PageKey& key) {
  uint64_t h = key.segment * 0x9E3779B97F4A7C15ull + key.page;
  h = (h ^ (h >> 32)) * 0xD6E8FEB86659FD93ull;
  h = (h ^ (h >> 32)) * 0xD6E8FEB86659FD93ull;
  return h ^ (h >> 32);
}

struct KeyHash {
  size_t operator()(const PageKey& key) const { return Mix(key); }
};

}  // namespace

class HostTier::Shard {
 public:
  Shard(std::byte* frames, uint32_t n_frames) : frames_(frames), slots_(n_frames) {
    for (uint32_t i = n_frames; i > 0; --i) free_.push_back(i - 1);
  }

  std::byte* frame(uint32_t i) const { return frames_ + i * kPageBytes; }

  // Needs mutex. The frame, or null.
  const std::byte* Find(const PageKey& key, Access access) {
    const auto it = index_.find(key);
    if (it == index_.end()) {
      ++misses;
      return nullptr;
    }
    ++hits;
    Slot& slot = slots_[it->second];
    if (access == Access::kPoint) slot.uses = std::min<uint8_t>(kMaxUses, slot.uses + 1);
    return frame(it->second);
  }

  void Insert(const PageKey& key, ConstPageBytes page, Access access) {
    std::lock_guard lock(mutex);
    if (slots_.empty() || index_.contains(key)) return;
    if (free_.empty()) {
      if (access == Access::kScan) return;
      Evict();
    }
    const uint32_t i = free_.back();
    free_.pop_back();
    const bool returning = access == Access::kPoint && ghosts_.erase(Mix(key)) > 0;
    slots_[i] = {key, 0, true};
    (returning ? main_ : small_).push_back(i);
    index_.emplace(key, i);
    std::memcpy(frame(i), page.data(), kPageBytes);
  }

  void EraseSegment(uint64_t segment) {
    std::lock_guard lock(mutex);
    for (std::deque<uint32_t>* queue : {&small_, &main_}) {
      std::erase_if(*queue, [&](uint32_t i) {
        if (slots_[i].key.segment != segment) return false;
        Release(i);
        return true;
      });
    }
  }

  uint64_t used() const { return slots_.size() - free_.size(); }

  mutable std::mutex mutex;
  uint64_t hits = 0, misses = 0;

 private:
  struct Slot {
    PageKey key;
    uint8_t uses = 0;  // since it entered its queue
    bool live = false;
  };

  void Release(uint32_t i) {
    index_.erase(slots_[i].key);
    slots_[i] = {};
    free_.push_back(i);
  }

  // Frees exactly one frame. Terminates: every pass lowers a use count or frees a frame.
  void Evict() {
    while (true) {
      const bool from_small =
          !small_.empty() && (small_.size() * 10 >= slots_.size() || main_.empty());
      std::deque<uint32_t>& queue = from_small ? small_ : main_;
      const uint32_t i = queue.front();
      queue.pop_front();
      Slot& slot = slots_[i];
      if (slot.uses > 0) {
        // Used again: moves up from the small queue, or stays with one life less.
        slot.uses = from_small ? 0 : slot.uses - 1;
        main_.push_back(i);
        continue;
      }
      if (from_small) Remember(slot.key);
      Release(i);
      return;
    }
  }

  void Remember(const PageKey& key) {
    const uint64_t hash = Mix(key);
    if (!ghosts_.emplace(hash, 0).second) return;
    ghost_order_.push_back(hash);
    while (ghost_order_.size() > slots_.size()) {
      ghosts_.erase(ghost_order_.front());
      ghost_order_.pop_front();
    }
  }

  std::byte* frames_;
  std::vector<Slot> slots_;
  std::vector<uint32_t> free_;
  std::deque<uint32_t> small_, main_;
  std::unordered_map<PageKey, uint32_t, KeyHash> index_;
  std::unordered_map<uint64_t, uint8_t> ghosts_;
  std::deque<uint64_t> ghost_order_;
};

HostTier::HostTier(uint64_t capacity_bytes) : capacity_pages_(capacity_bytes / kPageBytes) {
  const uint64_t n_shards = std::clamp<uint64_t>(capacity_pages_ / 64, 1, 16);
  const uint64_t per_shard = capacity_pages_ / n_shards;
  capacity_pages_ = per_shard * n_shards;
  if (capacity_pages_ > 0) {
    void* p = ::mmap(nullptr, capacity_pages_ * kPageBytes, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    arena_ = static_cast<std::byte*>(p);
  }
  for (uint64_t i = 0; i < n_shards; ++i) {
    shards_.push_back(std::make_unique<Shard>(arena_ + i * per_shard * kPageBytes,
                                              static_cast<uint32_t>(per_shard)));
  }
}

HostTier::~HostTier() {
  if (arena_ != nullptr) ::munmap(arena_, capacity_pages_ * kPageBytes);
}

HostTier::Shard& HostTier::ShardOf(const PageKey& key) const {
  return *shards_[(Mix(key) >> 40) % shards_.size()];
}

const std::byte* HostTier::Pin(const PageKey& key, Access access) {
  Shard& shard = ShardOf(key);
  shard.mutex.lock();
  const std::byte* page = shard.Find(key, access);
  if (page == nullptr) shard.mutex.unlock();
  return page;
}

void HostTier::Unpin(const PageKey& key) { ShardOf(key).mutex.unlock(); }

void HostTier::Insert(const PageKey& key, ConstPageBytes page, Access access) {
  ShardOf(key).Insert(key, page, access);
}

void HostTier::EraseSegment(uint64_t segment) {
  for (const auto& shard : shards_) shard->EraseSegment(segment);
}

HostTier::Stats HostTier::stats() const {
  Stats out;
  out.capacity = capacity_pages_ * kPageBytes;
  for (const auto& shard : shards_) {
    std::lock_guard lock(shard->mutex);
    out.bytes += shard->used() * kPageBytes;
    out.hits += shard->hits;
    out.misses += shard->misses;
  }
  return out;
}

}  // namespace prefixd::storage
