// Tests the tier against a model of it, and under many threads.
#include <algorithm>
#include <map>
#include <set>
#include <thread>

#include "tests/storage/host_tier/host_tier_fixture.h"

namespace prefixd::storage {
namespace {

// ---- everything at random -----------------------------------------------------------------------

// The Model is a plain description of what may and must be in the tier.
struct Model {
  // Holds the pages inserted and not erased since.
  std::map<std::pair<uint64_t, uint64_t>, uint64_t> version;
  struct Pinned {
    PagePins pins;
    std::vector<uint32_t> frames;
    std::vector<Page> contents;
  };
  std::vector<Pinned> pinned;
};

TEST(HostTierRandom, AgreesWithAModel) {
  std::mt19937_64 rng(Seed("HostTierRandom"));
  const auto tier = NewTier(kMiB, {{"t0", 0.4}});
  const uint64_t capacity = tier->stats().capacity;
  constexpr size_t kTenants = 3;
  std::vector<Region> r;
  std::array<Model, kTenants> models;
  for (size_t t = 0; t < kTenants; ++t) r.push_back(tier->ForTenant("t" + std::to_string(t)));
  uint64_t next = 1, refused = 0, borrowed = 0;
  for (int step = 0; step < 40000; ++step) {
    const size_t t = rng() % kTenants;
    Model& model = models[t];
    // Segment numbers are never used again: an erased segment gets the next one.
    static std::array<uint64_t, kTenants * 3> segments{};
    uint64_t& segment = segments[t * 3 + rng() % 3];
    if (segment == 0) segment = next++;
    const PageKey key{segment, rng() % 300};
    const auto known = model.version.find({key.segment, key.page});
    switch (rng() % 16) {
      default: {
        const Access access = rng() % 5 ? Access::kPoint : Access::kScan;
        const bool here = Holds(*r[t], key, access, t);
        ASSERT_TRUE(!here || known != model.version.end()) << "never put, or erased";
        if (!here) {
          r[t]->Insert(key, PageOf(key, t), access);
          model.version[{key.segment, key.page}] = 1;
        }
        break;
      }
      case 0: {
        std::set<uint64_t> pages;
        const size_t n = 1 + rng() % 20;
        while (pages.size() < n) pages.insert(rng() % 300);
        const std::vector<uint64_t> list(pages.begin(), pages.end());
        Model::Pinned pinned;
        auto pins = Borrow(*r[t], segment, list, &pinned.frames, t);
        if (!pins.ok()) {
          ASSERT_EQ(pins.error().code, Code::kResourceExhausted);
          // Some may have been inserted.
          for (const uint64_t p : list) model.version[{segment, p}] = 1;
          ++refused;
          break;
        }
        pinned.pins = *std::move(pins);
        for (const uint64_t p : list) {
          pinned.contents.push_back(PageOf({segment, p}, t));
          model.version[{segment, p}] = 1;
        }
        model.pinned.push_back(std::move(pinned));
        ++borrowed;
        break;
      }
      case 1:
      case 2: {
        if (model.pinned.empty()) break;
        const size_t i = rng() % model.pinned.size();
        for (size_t p = 0; p < model.pinned[i].frames.size(); ++p) {
          ASSERT_EQ(std::memcmp(r[t]->page(model.pinned[i].frames[p]).data(),
                                model.pinned[i].contents[p].data(), kPageBytes),
                    0);
        }
        model.pinned.erase(model.pinned.begin() + static_cast<ptrdiff_t>(i));
        break;
      }
      case 3:
        if (rng() % 40) break;
        tier->EraseSegment(r[t]->tenant(), segment, rng() % 2 ? 300 : UINT64_MAX);
        std::erase_if(model.version, [&](const auto& v) { return v.first.first == segment; });
        segment = 0;
        break;
    }
    if (step % 32 == 0) {
      ASSERT_LE(Resident(r), capacity);
      const HostTier::Stats s = tier->stats();
      ASSERT_LE(s.memory_bytes, capacity);
      ASSERT_LE(s.bytes, s.memory_bytes);
    }
  }
  EXPECT_GT(borrowed, 100u);
  for (Model& model : models) model.pinned.clear();
  EXPECT_EQ(tier->stats().pinned_bytes, 0u);
  for (const auto& r1 : r) EXPECT_EQ(r1->stats().pinned_bytes, 0u);
}

TEST(HostTierRandom, ManyThreadsKeepPagesWhole) {
  const auto tier = NewTier(kMiB);
  std::vector<std::thread> threads;
  std::atomic<bool> done{false};
  std::atomic<int> refused{0};
  for (uint64_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937_64 rng(t);
      for (int i = 0; i < 4000; ++i) {
        const uint64_t tenant = rng() % 3;
        const Region region = tier->ForTenant("t" + std::to_string(tenant));
        const PageKey key{1 + rng() % 2, rng() % 300};
        if (rng() % 8 == 0) {
          const std::vector<uint64_t> pages = {key.page, key.page + 1, key.page + 40};
          std::vector<uint32_t> frames;
          auto pins = Borrow(*region, key.segment, pages, &frames, tenant);
          if (!pins.ok()) {
            ++refused;
            continue;
          }
          for (size_t p = 0; p < pages.size(); ++p) {
            const Page expected = PageOf({key.segment, pages[p]}, tenant);
            EXPECT_EQ(std::memcmp(region->page(frames[p]).data(), expected.data(), kPageBytes), 0);
          }
        } else if (rng() % 500 == 0) {
          tier->EraseSegment(region->tenant(), key.segment);
        } else if (!Holds(*region, key, Access::kPoint, tenant)) {
          region->Insert(key, PageOf(key, tenant), Access::kPoint);
        }
      }
    });
  }
  std::thread watcher([&] {
    while (!done) {
      EXPECT_LE(tier->stats().memory_bytes, tier->stats().capacity);
      std::this_thread::yield();
    }
  });
  for (std::thread& t : threads) t.join();
  done = true;
  watcher.join();
  EXPECT_LE(tier->stats().bytes, tier->stats().capacity);
  EXPECT_EQ(tier->stats().pinned_bytes, 0u);
}

}  // namespace
}  // namespace prefixd::storage
