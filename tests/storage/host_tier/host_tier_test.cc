#include "storage/host_tier/host_tier.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <set>
#include <thread>

#include "tests/storage/host_tier/host_tier_fixture.h"

namespace prefixd::storage {
namespace {

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
  // The scan took free room only, and gives it back first.
  for (uint64_t p = 100; p < 120; ++p) Insert(*region, {1, p});
  for (uint64_t p = 0; p < 40; ++p) EXPECT_TRUE(Holds(*region, {1, p})) << p;
}

// A prefetched page is counted until it is used or leaves, is worth no more than a page read on
// demand, and takes no tenant's memory.
TEST(HostTier, PagesReadAheadAreCountedApart) {
  const auto tier = NewTier(64 * kPageBytes);
  const Region region = tier->ForTenant("t");
  const auto capacity = tier->stats().capacity / kPageBytes;
  for (uint64_t p = 0; p < 10; ++p) Insert(*region, {1, p}, Access::kPrefetch);
  Insert(*region, {1, 0}, Access::kPrefetch);  // is here already
  for (uint64_t p = 0; p < 4; ++p) EXPECT_TRUE(Holds(*region, {1, p}));
  for (uint64_t p = 0; p < 4; ++p) EXPECT_TRUE(Holds(*region, {1, p}));  // counts once
  EXPECT_TRUE(Holds(*region, {1, 5}, Access::kPrefetch));                // is useless
  EXPECT_FALSE(Holds(*region, {1, 11}, Access::kPrefetch));
  HostTier::Stats s = tier->stats();
  EXPECT_EQ(s.ahead.read, 11u);
  EXPECT_EQ(s.ahead.used, 4u);
  EXPECT_EQ(s.ahead.in_vain, 1u);
  EXPECT_EQ(s.hits, 8u);
  EXPECT_EQ(s.misses, 0u);
  Insert(*region, {1, 9});  // arrived while a read fetched it again
  tier->EraseSegment("t", 1);
  s = tier->stats();
  EXPECT_EQ(s.ahead.in_vain, 7u);
  EXPECT_EQ(s.ahead.used + s.ahead.in_vain, s.ahead.read);

  // Hot pages stay whatever the number of prefetched pages.
  for (uint64_t p = 0; p < 20; ++p) Insert(*region, {2, p});
  for (uint64_t p = 0; p < 20; ++p) EXPECT_TRUE(Holds(*region, {2, p}));
  for (uint64_t p = 0; p < 1000; ++p) Insert(*region, {3, p}, Access::kPrefetch);
  for (uint64_t p = 0; p < 20; ++p) EXPECT_TRUE(Holds(*region, {2, p})) << p;
  s = tier->stats();
  EXPECT_EQ(s.ahead.read - s.ahead.used - s.ahead.in_vain, capacity - 20);

  // Prefetch takes no memory from another tenant.
  const Region other = tier->ForTenant("u");
  Insert(*other, {4, 0}, Access::kPrefetch);
  EXPECT_FALSE(Holds(*other, {4, 0}));
  Insert(*other, {4, 0});
  EXPECT_TRUE(Holds(*other, {4, 0}));
}

// A prefetched page that had left early ranks, once used, like one that a step brought back.
TEST(HostTier, APageReadAheadThatReturnsOutlivesManyUsedOnce) {
  const auto tier = NewTier(64 * kPageBytes);
  const Region region = tier->ForTenant("t");
  const PageKey returns{1, 0}, fresh{1, 100};
  Insert(*region, returns);
  for (uint64_t p = 0; Holds(*region, returns, Access::kPrefetch); ++p) {
    ASSERT_LT(p, 1000u);
    Insert(*region, {2, p});
  }
  Insert(*region, returns, Access::kPrefetch);
  Insert(*region, fresh, Access::kPrefetch);
  EXPECT_TRUE(Holds(*region, returns));
  EXPECT_TRUE(Holds(*region, fresh));
  for (uint64_t p = 0; p < 500; ++p) Insert(*region, {3, p});
  EXPECT_TRUE(Holds(*region, returns));
  EXPECT_FALSE(Holds(*region, fresh));
  EXPECT_EQ(tier->stats().ahead.used, 2u);
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
  // Where the limit on locked memory is low, the tier works without locking.
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
  // Freed memory goes to the first tenant that requests it.
  tier->EraseSegment("b", 2);
  for (uint64_t p = 0; p < pages; ++p) Insert(*r[0], {3, p});
  EXPECT_EQ(r[0]->stats().memory_bytes, capacity);
}

// Clearing memory takes the kernel long: nobody waits for another's.
TEST(HostTierTenants, TakeMemoryAtTheSameTime) {
  std::mutex mutex;
  std::condition_variable changed;
  int taking = 0;
  const auto tier = *HostTier::Create(
      {.capacity_bytes = 16 * kMiB, .on_block = [&](std::span<std::byte>, bool taken) {
         if (!taken) return;
         std::unique_lock lock(mutex);
         ++taking;
         changed.notify_all();
         changed.wait_for(lock, std::chrono::seconds(20), [&] { return taking >= 2; });
       }});
  const Region regions[] = {tier->ForTenant("a"), tier->ForTenant("b")};
  const auto begun = std::chrono::steady_clock::now();
  std::vector<std::jthread> threads;
  for (const Region& region : regions) {
    threads.emplace_back([&region] { Insert(*region, {1, 7}); });
  }
  threads.clear();
  EXPECT_LT(std::chrono::steady_clock::now() - begun, std::chrono::seconds(15));
  for (const Region& region : regions) EXPECT_TRUE(Holds(*region, {1, 7}));
  EXPECT_EQ(tier->stats().memory_bytes, Resident(regions));
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

// Whatever filled the tier before, and however keys spread over its shards, all of its memory
// serves the current working set. The second tenant has a small share of a region that could be
// large.
TEST(HostTierTenants, ALaterWorkingSetHasAllTheMemory) {
  const Page page = PageOf({1, 1});
  for (const double share : {1.0, 0.25}) {
    for (const int earlier_passes : {1, 2, 4}) {
      std::vector<std::pair<std::string, double>> shares;
      if (share < 1) shares = {{"t", share}, {"other", 1 - share}};
      const auto tier = NewTier(256 * kMiB, shares);
      const Region region = tier->ForTenant("t"), other = tier->ForTenant("other");
      const uint64_t capacity = tier->stats().capacity / kPageBytes;
      for (uint64_t p = 0; share < 1 && p < capacity; ++p) {
        other->Insert({9, p}, page, Access::kPoint);
      }
      const auto pages = static_cast<uint64_t>(share * double(capacity));
      const auto use = [&](uint64_t segment, uint64_t n) {
        uint64_t missing = 0;
        for (uint64_t p = 0; p < n; ++p) {
          uint32_t frame = kNoFrame;
          region->Pin(segment, std::span(&p, 1), Access::kPoint, std::span(&frame, 1));
          if (frame == kNoFrame) {
            ++missing;
            region->Insert({segment, p}, page, Access::kPoint);
          }
          region->Unpin({&frame, 1});
        }
        return missing;
      };
      for (int pass = 0; pass < earlier_passes; ++pass) use(1, pages);
      const uint64_t now = pages * 85 / 100;
      for (int pass = 0; pass < 4; ++pass) use(2, now);
      EXPECT_LE(use(2, now), now / 100) << "of " << now << " pages, share " << share << ", after "
                                        << earlier_passes << " passes over others";
    }
  }
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
  tier->EraseSegment("a", 1);  // taken back: zeros, in this mapping too
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
    // Reading where no block is makes zero pages there; they do not stay.
    const uint64_t capacity = tier->stats().capacity;
    ASSERT_LE(Resident(r), capacity);
  }
  for (const auto& view : views) ::munmap(const_cast<std::byte*>(view.data()), view.size());
}

}  // namespace
}  // namespace prefixd::storage
