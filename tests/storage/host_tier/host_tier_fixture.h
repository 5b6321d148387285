// Makes pages that follow from their keys, and a tier that holds them.
#pragma once

#include <array>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "storage/host_tier/host_tier.h"
#include "tests/storage/store_fixture.h"

namespace prefixd::storage {

using Page = std::array<std::byte, kPageBytes>;
using Region = std::shared_ptr<TierRegion>;

constexpr uint64_t kMiB = 1 << 20;

inline Page PageOf(const PageKey& key, uint64_t salt = 0) {
  Page page;
  FillRow(Mix(key.segment) ^ key.page ^ Mix(salt), 0, 0, page);
  return page;
}

inline std::unique_ptr<HostTier> NewTier(uint64_t bytes,
                                         std::vector<std::pair<std::string, double>> shares = {}) {
  auto tier = HostTier::Create({.capacity_bytes = bytes, .shares = std::move(shares)});
  EXPECT_TRUE(tier.ok()) << tier.error().message;
  return *std::move(tier);
}

inline bool Holds(TierRegion& region, const PageKey& key, Access access = Access::kPoint,
                  uint64_t salt = 0) {
  uint32_t frame = kNoFrame;
  region.Pin(key.segment, std::span(&key.page, 1), access, std::span(&frame, 1));
  if (frame == kNoFrame) return false;
  const Page expected = PageOf(key, salt);
  EXPECT_EQ(std::memcmp(region.page(frame).data(), expected.data(), kPageBytes), 0);
  region.Unpin({&frame, 1});
  return true;
}

inline void Insert(TierRegion& region, const PageKey& key, Access access = Access::kPoint) {
  region.Insert(key, PageOf(key), access);
}

// Reads the pages in place; returns the pins of all pages, or the error.
inline Result<PagePins> Borrow(TierRegion& region, uint64_t segment,
                               std::span<const uint64_t> pages, std::vector<uint32_t>* frames,
                               uint64_t salt = 0) {
  PREFIXD_ASSIGN(PagePins pins, region.Promise(pages.size()));
  frames->assign(pages.size(), kNoFrame);
  region.Pin(segment, pages, Access::kPoint, *frames, pins);
  for (size_t i = 0; i < pages.size(); ++i) {
    if ((*frames)[i] != kNoFrame) continue;
    const PageKey key{segment, pages[i]};
    PREFIXD_ASSIGN((*frames)[i], region.InsertPinned(key, PageOf(key, salt), pins));
  }
  return pins;
}

inline uint64_t Resident(std::span<const Region> regions) {
  uint64_t bytes = 0;
  for (const Region& r : regions) bytes += r->memory()->resident_bytes();
  return bytes;
}

}  // namespace prefixd::storage
