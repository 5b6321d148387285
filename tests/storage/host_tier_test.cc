#include "storage/host_tier.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <thread>

#include "storage/stream_copy.h"
#include "tests/storage/store_fixture.h"

namespace prefixd::storage {
namespace {

using Page = std::array<std::byte, kPageBytes>;
using Region = std::shared_ptr<TierRegion>;

constexpr uint64_t kMiB = 1 << 20;

Page PageOf(const PageKey& key, uint64_t salt = 0) {
  Page page;
  FillRow(Mix(key.segment) ^ key.page ^ Mix(salt), 0, 0, page);
  return page;
}

std::unique_ptr<HostTier> NewTier(uint64_t bytes,
                                  std::vector<std::pair<std::string, double>> shares = {}) {
  auto tier = HostTier::Create({.capacity_bytes = bytes, .shares = std::move(shares)});
  EXPECT_TRUE(tier.ok()) << tier.error().message;
  return *std::move(tier);
}

bool Holds(TierRegion& region, const PageKey& key, Access access = Access::kPoint,
           uint64_t salt = 0) {
  uint32_t frame = kNoFrame;
  region.Pin(key.segment, std::span(&key.page, 1), access, std::span(&frame, 1));
  if (frame == kNoFrame) return false;
  const Page expected = PageOf(key, salt);
  EXPECT_EQ(std::memcmp(region.page(frame).data(), expected.data(), kPageBytes), 0);
  region.Unpin({&frame, 1});
  return true;
}

void Insert(TierRegion& region, const PageKey& key, Access access = Access::kPoint) {
  region.Insert(key, PageOf(key), access);
}

// Reads the pages in place: each is here afterwards, or the error.
Result<PagePins> Borrow(TierRegion& region, uint64_t segment, std::span<const uint64_t> pages,
                        std::vector<uint32_t>* frames, uint64_t salt = 0) {
  PREFIXD_ASSIGN(PagePins pins, region.Promise(pages.size()));
  frames->assign(pages.size(), kNoFrame);
  region.Pin(segment, pages, *frames, pins);
  for (size_t i = 0; i < pages.size(); ++i) {
    if ((*frames)[i] != kNoFrame) continue;
    const PageKey key{segment, pages[i]};
    PREFIXD_ASSIGN((*frames)[i], region.InsertPinned(key, PageOf(key, salt), pins));
  }
  return pins;
}

uint64_t Resident(std::span<const Region> regions) {
  uint64_t bytes = 0;
  for (const Region& r : regions) bytes += r->memory()->resident_bytes();
  return bytes;
}

TEST(HostTier, StaysWithinItsBoundAndNeverMixesPages) {
  std::mt19937_64 rng(Seed("HostTier.StaysWithinItsBound"));
  const auto tier = NewTier(300 * kPageBytes + 5);
  const Region region = tier->ForTenant("t");
  const uint64_t capacity = tier->stats().capacity;
  EXPECT_LE(capacity, 300 * kPageBytes);
  EXPECT_GT(capacity, 290 * kPageBytes);
  for (int i = 0; i < 20000; ++i) {
    const PageKey key{rng() % 3, rng() % 400};
    if (!Holds(*region, key)) Insert(*region, key);
    ASSERT_LE(tier->stats().bytes, capacity);
  }
  EXPECT_LE(region->memory()->resident_bytes(), capacity);
  const HostTier::Stats s = tier->stats();
  EXPECT_EQ(s.bytes, capacity);
  EXPECT_EQ(s.memory_bytes, capacity);
  EXPECT_EQ(s.hits + s.misses, 20000u);
  EXPECT_GT(s.hits, 0u);
  EXPECT_GT(s.evictions, 0u);
  tier->EraseSegment("t", 1);
  for (uint64_t p = 0; p < 400; ++p) EXPECT_FALSE(Holds(*region, {1, p}));
  EXPECT_LT(tier->stats().bytes, capacity);
  tier->EraseSegment("t", 0);
  tier->EraseSegment("t", 2);
  EXPECT_EQ(tier->stats().bytes, 0u);
  EXPECT_EQ(region->memory()->resident_bytes(), 0u);  // given back to the system
}

TEST(HostTier, AScanOfFarMorePagesLeavesHotOnesInPlace) {
  const auto tier = NewTier(64 * kPageBytes);
  const Region region = tier->ForTenant("t");
  for (uint64_t p = 0; p < 40; ++p) Insert(*region, {1, p});
  for (uint64_t p = 0; p < 1000; ++p) {
    if (!Holds(*region, {2, p}, Access::kScan)) Insert(*region, {2, p}, Access::kScan);
  }
  for (uint64_t p = 0; p < 40; ++p) EXPECT_TRUE(Holds(*region, {1, p})) << p;
  // The scan took the free room only, and gives it back first.
  for (uint64_t p = 100; p < 120; ++p) Insert(*region, {1, p});
  for (uint64_t p = 0; p < 40; ++p) EXPECT_TRUE(Holds(*region, {1, p})) << p;
}

TEST(HostTier, PagesUsedAgainOutliveManyUsedOnce) {
  const auto tier = NewTier(64 * kPageBytes);
  const Region region = tier->ForTenant("t");
  for (uint64_t p = 0; p < 20; ++p) {
    Insert(*region, {1, p});
    EXPECT_TRUE(Holds(*region, {1, p}));
  }
  for (uint64_t p = 0; p < 500; ++p) Insert(*region, {2, p});
  for (uint64_t p = 0; p < 20; ++p) EXPECT_TRUE(Holds(*region, {1, p})) << p;
}

TEST(HostTier, ZeroCapacityHoldsNothing) {
  const auto tier = NewTier(0);
  const Region region = tier->ForTenant("t");
  Insert(*region, {1, 1});
  EXPECT_FALSE(Holds(*region, {1, 1}));
  EXPECT_CODE(region->Promise(1), Code::kFailedPrecondition);
  tier->EraseSegment("t", 1);
}

TEST(HostTier, WhatCannotBeIsAnErrorAtOnce) {
  EXPECT_CODE(HostTier::Create({.capacity_bytes = UINT64_MAX}), Code::kResourceExhausted);
  EXPECT_CODE(HostTier::Create({.capacity_bytes = 1ull << 60}), Code::kResourceExhausted);
  const auto with = [](std::vector<std::pair<std::string, double>> shares) {
    return HostTier::Create({.capacity_bytes = kMiB, .shares = std::move(shares)});
  };
  EXPECT_CODE(with({{"a", 0.0}}), Code::kInvalidArgument);
  EXPECT_CODE(with({{"a", 1.5}}), Code::kInvalidArgument);
  EXPECT_CODE(with({{"a", 0.6}, {"b", 0.5}}), Code::kInvalidArgument);
  EXPECT_TRUE(with({{"a", 0.1}, {"b", 0.9}}).ok());
}

TEST(HostTier, HugePagesThatAreNotThereAreDoneWithout) {
  auto tier = HostTier::Create({.capacity_bytes = 8 * kMiB, .hugetlb = true});
  ASSERT_TRUE(tier.ok()) << tier.error().message;
  const Region region = (*tier)->ForTenant("t");
  for (uint64_t p = 0; p < 1024; ++p) Insert(*region, {1, p});
  for (uint64_t p = 0; p < 1024; ++p) EXPECT_TRUE(Holds(*region, {1, p})) << p;
  EXPECT_FALSE((*tier)->stats().huge_pages.empty());
}

TEST(HostTier, LockedMemoryIsGivenBackToo) {
  // Where the limit on locked memory is low, the tier goes on without.
  auto tier = HostTier::Create({.capacity_bytes = kMiB, .lock_memory = true});
  ASSERT_TRUE(tier.ok()) << tier.error().message;
  const Region region = (*tier)->ForTenant("t");
  for (uint64_t p = 0; p < 256; ++p) Insert(*region, {1, p});
  for (uint64_t p = 0; p < 256; ++p) EXPECT_TRUE(Holds(*region, {1, p})) << p;
  (*tier)->EraseSegment("t", 1);
  EXPECT_EQ(region->memory()->resident_bytes(), 0u);
}

// ---- tenants ------------------------------------------------------------------------------------

TEST(HostTierTenants, OneMayUseAllUntilAnotherClaimsItsShare) {
  const auto tier = NewTier(8 * kMiB);
  const uint64_t capacity = tier->stats().capacity, pages = capacity / kPageBytes;
  const std::vector<Region> r = {tier->ForTenant("a"), tier->ForTenant("b")};
  for (uint64_t p = 0; p < pages; ++p) Insert(*r[0], {1, p});
  EXPECT_EQ(r[0]->stats().memory_bytes, capacity);
  // A scan of another tenant finds no free room and takes none away.
  for (uint64_t p = 0; p < pages; ++p) Insert(*r[1], {2, p}, Access::kScan);
  EXPECT_EQ(r[1]->stats().bytes, 0u);
  for (uint64_t p = 0; p < pages; ++p) {
    Insert(*r[1], {2, p});
    ASSERT_LE(Resident(r), capacity);
  }
  EXPECT_EQ(r[0]->stats().memory_bytes, capacity / 2);
  EXPECT_EQ(r[1]->stats().memory_bytes, capacity / 2);
  EXPECT_EQ(r[0]->memory()->resident_bytes(), capacity / 2);
  EXPECT_GT(r[0]->stats().evictions, 0u);
  // What is free again goes to whoever asks first.
  tier->EraseSegment("b", 2);
  for (uint64_t p = 0; p < pages; ++p) Insert(*r[0], {3, p});
  EXPECT_EQ(r[0]->stats().memory_bytes, capacity);
}

TEST(HostTierTenants, SharesByNameAreKept) {
  const auto tier = NewTier(16 * kMiB, {{"big", 0.5}, {"small", 0.125}});
  const uint64_t capacity = tier->stats().capacity, pages = capacity / kPageBytes;
  const std::vector<Region> r = {tier->ForTenant("big"), tier->ForTenant("small"),
                                 tier->ForTenant("x"), tier->ForTenant("y")};
  std::mt19937_64 rng(Seed("HostTierTenants.Shares"));
  for (uint64_t i = 0; i < 12 * pages; ++i) {
    Insert(*r[i % 4], {1, rng() % pages});
    if (i % 64 == 0) {
      ASSERT_LE(Resident(r), capacity);
    }
  }
  const auto share = [&](size_t i) {
    return double(r[i]->stats().memory_bytes) / double(capacity);
  };
  EXPECT_NEAR(share(0), 0.5, 0.04);
  EXPECT_NEAR(share(1), 0.125, 0.04);
  EXPECT_NEAR(share(2), 0.1875, 0.04);
  EXPECT_NEAR(share(3), 0.1875, 0.04);
  const auto tenants = tier->stats().tenants;
  ASSERT_EQ(tenants.size(), 4u);
  EXPECT_EQ(tenants[0].tenant, "big");
  EXPECT_EQ(tenants[0].share_bytes, capacity / 2);
}

TEST(HostTierTenants, TakenMemoryIsWhatWasLeastUsed) {
  const auto tier = NewTier(8 * kMiB);
  const uint64_t pages = tier->stats().capacity / kPageBytes;
  const Region a = tier->ForTenant("a"), b = tier->ForTenant("b");
  // Hot pages lie together, as they were read; they alone reach the main queue.
  for (uint64_t p = 0; p < pages / 4; ++p) Insert(*a, {1, p});
  for (uint64_t p = 0; p < pages / 4; ++p) EXPECT_TRUE(Holds(*a, {1, p}));
  for (uint64_t p = 0; p < 2 * pages; ++p) Insert(*a, {2, p});
  for (uint64_t p = 0; p < pages / 2; ++p) Insert(*b, {3, p});
  uint64_t hot = 0;
  for (uint64_t p = 0; p < pages / 4; ++p) hot += Holds(*a, {1, p});
  EXPECT_GE(hot, pages / 4 * 9 / 10);
}

TEST(HostTierTenants, AReceiverOfTheDescriptorReadsAndCannotWrite) {
  const auto tier = NewTier(4 * kMiB);
  const Region a = tier->ForTenant("a");
  for (uint64_t p = 0; p < 100; ++p) Insert(*a, {1, p});
  const int fd = ::dup(a->memory()->read_only_fd());  // as a process at the other end would have it
  ASSERT_GE(fd, 0);
  const size_t size = a->bytes().size();
  EXPECT_EQ(::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0), MAP_FAILED);
  EXPECT_EQ(errno, EACCES);
  const char byte = 1;
  EXPECT_EQ(::pwrite(fd, &byte, 1, 0), -1);
  EXPECT_NE(::ftruncate(fd, 0), 0);
  EXPECT_NE(::fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 4096), 0);
  if (::geteuid() != 0) {  // root may open anything
    const std::string self = "/proc/self/fd/" + std::to_string(fd);
    EXPECT_EQ(::open(self.c_str(), O_RDWR), -1);
    EXPECT_EQ(errno, EACCES);
  }
  void* at = ::mmap(nullptr, size, PROT_READ, MAP_SHARED, fd, 0);
  ASSERT_NE(at, MAP_FAILED);
  EXPECT_EQ(::mprotect(at, size, PROT_READ | PROT_WRITE), -1);
  EXPECT_EQ(std::memcmp(at, a->bytes().data(), size), 0);
  EXPECT_EQ(::lseek(fd, 0, SEEK_END), static_cast<off_t>(size));
  tier->EraseSegment("a", 1);  // taken back: zeros, here too
  const auto seen = std::span(static_cast<const std::byte*>(at), size);
  EXPECT_TRUE(std::all_of(seen.begin(), seen.end(), [](std::byte x) { return x == std::byte{0}; }));
  ::munmap(at, size);
  ::close(fd);
}

TEST(HostTierTenants, NoRegionEverShowsAnothersBytes) {
  std::mt19937_64 rng(Seed("HostTierTenants.NoRegion"));
  const auto tier = NewTier(2 * kMiB);
  const std::vector<std::string> names = {"a", "b", "c"};
  std::vector<Region> r;
  std::vector<std::span<const std::byte>> views;
  for (const std::string& name : names) {
    r.push_back(tier->ForTenant(name));
    void* at = ::mmap(nullptr, r.back()->bytes().size(), PROT_READ, MAP_SHARED,
                      r.back()->memory()->read_only_fd(), 0);
    ASSERT_NE(at, MAP_FAILED);
    views.emplace_back(static_cast<const std::byte*>(at), r.back()->bytes().size());
  }
  for (int round = 0; round < 30; ++round) {
    for (int i = 0; i < 400; ++i) {
      const size_t t = rng() % 3;
      Page page;
      page.fill(std::byte(t + 1));
      r[t]->Insert({rng() % 2, rng() % 600}, page, rng() % 4 ? Access::kPoint : Access::kScan);
    }
    if (round % 5 == 4) tier->EraseSegment(names[rng() % 3], rng() % 2);
    for (size_t t = 0; t < 3; ++t) {
      ASSERT_TRUE(std::all_of(views[t].begin(), views[t].end(), [&](std::byte x) {
        return x == std::byte{0} || x == std::byte(t + 1);
      })) << names[t];
    }
    // Looking where nothing is makes zeros there; they do not stay.
    const uint64_t capacity = tier->stats().capacity;
    ASSERT_LE(Resident(r), capacity);
  }
  for (const auto& view : views) ::munmap(const_cast<std::byte*>(view.data()), view.size());
}

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
  tier->EraseSegment("a", 1);  // found no more, but not gone
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
  EXPECT_TRUE(a->Promise(bound).ok());  // given up at once: the temporary dies
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

// ---- everything at random -----------------------------------------------------------------------

// A plain description of what may and must be.
struct Model {
  std::map<std::pair<uint64_t, uint64_t>, uint64_t> version;  // of pages put and not erased since
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
    // Numbers of segments are never used again: an erased one gets the next.
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
          for (const uint64_t p : list) model.version[{segment, p}] = 1;  // some were put
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
        tier->EraseSegment(r[t]->tenant(), segment);
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

TEST(StreamCopy, CopiesAnyLengthAndAlignment) {
  std::mt19937_64 rng(Seed("StreamCopy"));
  std::vector<std::byte> from(8192), to(8192), expected;
  for (std::byte& b : from) b = std::byte(rng());
  for (int i = 0; i < 2000; ++i) {
    const size_t a = rng() % 200, b = rng() % 200, n = rng() % (rng() % 2 ? 300 : 7900);
    to.assign(to.size(), std::byte{0});
    expected = to;
    std::copy_n(from.begin() + static_cast<ptrdiff_t>(a), n,
                expected.begin() + static_cast<ptrdiff_t>(b));
    StreamCopy(to.data() + b, from.data() + a, n);
    ASSERT_EQ(to, expected) << a << " " << b << " " << n;
  }
}

}  // namespace
}  // namespace prefixd::storage
