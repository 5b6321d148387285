// Tests pages that are read in place.
#include <algorithm>
#include <set>

#include "tests/storage/host_tier/host_tier_fixture.h"

namespace prefixd::storage {
namespace {

// ---- pins ---------------------------------------------------------------------------------------

TEST(HostTierPins, PinnedPagesStayWhateverComes) {
  const auto tier = NewTier(2 * kMiB);
  const Region a = tier->ForTenant("a"), b = tier->ForTenant("b");
  std::vector<uint64_t> pages;
  for (uint64_t p = 0; p < 100; ++p) pages.push_back(p * 5);
  std::vector<uint32_t> frames;
  auto pins = Borrow(*a, 1, pages, &frames);
  ASSERT_TRUE(pins.ok()) << pins.error().message;
  EXPECT_EQ(a->stats().pinned_bytes, 100 * kPageBytes);
  for (uint64_t p = 0; p < 5000; ++p) {
    Insert(*a, {2, p});
    Insert(*b, {3, p});
  }
  tier->EraseSegment("a", 1);  // no lookup finds them any more, but their bytes stay
  for (size_t i = 0; i < pages.size(); ++i) {
    EXPECT_FALSE(Holds(*a, {1, pages[i]}));
    const Page expected = PageOf({1, pages[i]});
    EXPECT_EQ(std::memcmp(a->page(frames[i]).data(), expected.data(), kPageBytes), 0);
  }
  pins->Release();
  EXPECT_EQ(a->stats().pinned_bytes, 0u);
  for (uint64_t p = 0; p < 5000; ++p) Insert(*a, {2, p});  // their frames are used again
  EXPECT_EQ(a->stats().bytes, a->stats().memory_bytes);
}

TEST(HostTierPins, AreBoundedByHalfTheShare) {
  const auto tier = NewTier(2 * kMiB, {{"a", 0.5}});
  const Region a = tier->ForTenant("a");
  const uint64_t bound = tier->stats().capacity / 2 / 2 / kPageBytes;
  std::vector<uint64_t> pages(bound);
  for (uint64_t p = 0; p < bound; ++p) pages[p] = p;
  std::vector<uint32_t> frames;
  auto all = Borrow(*a, 1, pages, &frames);
  ASSERT_TRUE(all.ok()) << all.error().message;
  const auto more = a->Promise(1);
  EXPECT_CODE(more, Code::kResourceExhausted);
  EXPECT_NE(more.error().message.find("tenant 'a'"), std::string::npos) << more.error().message;
  PagePins moved = *std::move(all);
  EXPECT_FALSE(a->Promise(1).ok());
  moved = PagePins();
  EXPECT_TRUE(a->Promise(bound).ok());  // released at once: the temporary dies
  EXPECT_TRUE(a->Promise(bound).ok());
}

TEST(HostTierPins, OutliveTheTier) {
  auto tier = NewTier(kMiB);
  std::vector<uint32_t> frames;
  const std::vector<uint64_t> pages = {7};
  auto pins = Borrow(*tier->ForTenant("a"), 1, pages, &frames);
  ASSERT_TRUE(pins.ok());
  tier.reset();
  const Page expected = PageOf({1, 7});
  EXPECT_EQ(std::memcmp(pins->region()->page(frames[0]).data(), expected.data(), kPageBytes), 0);
}

TEST(HostTierPins, BlocksAreAnnouncedBeforeUseAndAfter) {
  std::set<const std::byte*> live;
  uint64_t most = 0;
  HostTierOptions options{.capacity_bytes = 2 * kMiB};
  options.on_block = [&](std::span<std::byte> block, bool taken) {
    const bool changed = taken ? live.insert(block.data()).second : live.erase(block.data()) > 0;
    EXPECT_TRUE(changed);
    most = std::max<uint64_t>(most, live.size() * block.size());
  };
  {
    auto tier = HostTier::Create(options);
    ASSERT_TRUE(tier.ok());
    for (uint64_t p = 0; p < 1000; ++p) {
      Insert(*(*tier)->ForTenant("a"), {1, p});
      Insert(*(*tier)->ForTenant("b"), {2, p});
    }
    EXPECT_EQ(most, (*tier)->stats().capacity);
  }
  EXPECT_TRUE(live.empty());
}

}  // namespace
}  // namespace prefixd::storage
