// Manages a region's memory: blocks that come from the tier's budget and go back to the system.
#include <algorithm>
#include <functional>
#include <memory>
#include <utility>

#include "storage/host_tier/tier_region.h"
#include "storage/io/errors.h"

namespace prefixd::storage {
namespace {

constexpr int kRetireAttempts = 8;
// Frames and the memory of early leavers take about this part of the pages.
constexpr uint64_t kOverheadParts = 32;

}  // namespace

std::span<std::byte> TierRegion::BlockBytes(uint32_t index) const {
  const uint64_t block_bytes = frames_.block_pages() * kPageBytes;
  return bytes().subspan(index * block_bytes, block_bytes);
}

std::optional<MemoryCharge> TierRegion::TakeBlockMemory() const {
  const uint64_t bytes = frames_.block_pages() * kPageBytes;
  return options_.memory.TryTake(MemoryKind::kHostTier, bytes + bytes / kOverheadParts);
}

Result<uint32_t> TierRegion::AddBlock(MemoryCharge memory) {
  while (first_gap_ < frames_.n_blocks() && frames_.block(first_gap_)) ++first_gap_;
  const uint32_t index = first_gap_;
  if (index == frames_.n_blocks()) {
    return Error{Code::kInternal, "the host tier's region is larger than its budget"};
  }
  const uint32_t n = frames_.block_pages();
  auto block = std::make_unique<TierBlock>(index * n, n);
  block->memory = std::move(memory);
  block->free.reserve(n);
  std::lock_guard lock(pool_mutex_);
  frames_.block(index) = std::move(block);
  ++n_blocks_;
  return index;
}

Status TierRegion::FillBlock(uint32_t index) {
  const std::span<std::byte> where = BlockBytes(index);
  const uint64_t offset = static_cast<uint64_t>(where.data() - bytes().data());
  PREFIXD_TRY(memory_->Take(offset, where.size()));
  if (options_.lock_memory) {
    Status locked = memory_->Lock(offset, where.size());
    if (!locked.ok() && !warned_of_lock_.exchange(true)) {
      LogWarning(locked.error().message + "; raise the memlock limit (ulimit -l)");
    }
  }
  if (options_.on_block) options_.on_block(where, true);
  std::lock_guard lock(pool_mutex_);
  TierBlock& block = *frames_.block(index);
  const uint32_t n = frames_.block_pages();
  // The lowest frame is handed out first, so that runs that are read together lie together.
  for (uint32_t i = n; i > 0; --i) block.free.push_back(block.first + i - 1);
  block.coming = false;
  open_.push_back(index);
  return {};
}

bool TierRegion::Pinned(TierBlock& block) const {
  return std::any_of(block.frames.begin(), block.frames.end(), [](const TierFrame& frame) {
    return frame.pins.load(std::memory_order_relaxed) > 0;
  });
}

bool TierRegion::RemoveBlock() {
  struct Candidate {
    uint32_t hot, index;
    auto operator<=>(const Candidate&) const = default;
  };
  std::vector<Candidate> candidates;
  for (uint32_t i = 0; i < frames_.n_blocks(); ++i) {
    const auto& block = frames_.block(i);
    if (!block || block->coming) continue;
    candidates.push_back({block->hot.load(std::memory_order_relaxed), i});
  }
  std::make_heap(candidates.begin(), candidates.end(), std::greater<>());
  for (int attempts = 0; !candidates.empty() && attempts < kRetireAttempts;) {
    std::pop_heap(candidates.begin(), candidates.end(), std::greater<>());
    const uint32_t index = candidates.back().index;
    candidates.pop_back();
    if (Pinned(*frames_.block(index))) continue;
    if (Retire(index)) return true;
    ++attempts;
  }
  return false;
}

// Empties a block and gives its memory back. A concurrent pin or insert may interfere: then the
// block stays, with its remaining pages.
bool TierRegion::Retire(uint32_t index) {
  TierBlock& block = *frames_.block(index);
  {
    std::lock_guard lock(pool_mutex_);
    block.retiring = true;
  }
  std::vector<uint32_t> left;
  for (uint32_t i = 0; i < block.frames.size(); ++i) {
    const uint8_t shard = block.frames[i].shard.load(std::memory_order_relaxed);
    if (shard == 0) continue;
    TierShard& s = *shards_[shard - 1];
    std::lock_guard lock(s.mutex);
    if (s.Evict(block.first + i)) left.push_back(block.first + i);
  }
  {
    std::lock_guard lock(pool_mutex_);
    for (const uint32_t f : left) FreeLocked(f);
    SweepLimbo();
    if (block.free.size() < block.frames.size()) {
      block.retiring = false;
      open_.push_back(index);
      return false;
    }
    std::erase(open_, index);
  }
  DropBlock(index);
  return true;
}

uint64_t TierRegion::RemoveEmptyBlocks() {
  uint64_t removed = 0;
  for (uint32_t i = 0; i < frames_.n_blocks(); ++i) {
    if (!frames_.block(i)) continue;
    {
      std::lock_guard lock(pool_mutex_);
      TierBlock& block = *frames_.block(i);
      if (block.free.size() < block.frames.size()) continue;
      block.retiring = true;
      std::erase(open_, i);
    }
    DropBlock(i);
    ++removed;
  }
  return removed;
}

void TierRegion::GiveBackStray() {
  if (!memory_) return;
  const uint64_t block_bytes = frames_.block_pages() * kPageBytes;
  if (memory_->resident_bytes() <= n_blocks_ * block_bytes) return;
  for (uint32_t i = 0, end = 0; i < frames_.n_blocks(); i = end) {
    for (end = i; end < frames_.n_blocks() && !frames_.block(end);) ++end;
    if (end > i) (void)memory_->GiveBack(i * block_bytes, (end - i) * block_bytes);
    end = std::max(end, i + 1);
  }
}

void TierRegion::DropBlock(uint32_t index) {
  const std::span<std::byte> where = BlockBytes(index);
  if (options_.on_block && !frames_.block(index)->coming) options_.on_block(where, false);
  Status given =
      memory_->GiveBack(static_cast<uint64_t>(where.data() - bytes().data()), where.size());
  if (!given.ok()) LogWarning(given.error().message);
  std::lock_guard lock(pool_mutex_);
  frames_.block(index).reset();
  first_gap_ = std::min(first_gap_, index);
  --n_blocks_;
}

}  // namespace prefixd::storage
