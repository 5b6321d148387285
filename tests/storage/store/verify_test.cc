// Tests what a verification covers: every segment that a prefix needs, each once, also while
// segments are removed and compacted.
#include <algorithm>
#include <set>

#include "base/call_scope.h"
#include "base/memory_budget.h"
#include "storage/store/open_store.h"
#include "tests/storage/io/faulty_engine.h"
#include "tests/storage/open_store.h"

namespace prefixd::storage {
namespace {

class VerifyTest : public OpenStoreTest {
 protected:
  VerifyTest() { Open(); }

  // Counts progress, and calls `at_half` once when half is done.
  Progress Watch(std::function<void()> at_half = nullptr) {
    return [this, at_half = std::move(at_half), called = false](uint64_t done, uint64_t total,
                                                                std::string_view unit) mutable {
      EXPECT_GE(done, done_);
      EXPECT_LE(done, total);
      EXPECT_EQ(unit, "pages");
      done_ = done, total_ = total;
      if (at_half && !called && done * 2 >= total) {
        called = true;
        at_half();
      }
      return true;
    };
  }

  uint64_t Pages(std::span<const SegmentId> segments) {
    uint64_t pages = 0;
    for (const SegmentId& id : segments) {
      pages += std::filesystem::file_size(SegmentPath(options_.dir, store_->GetPrefix(id)->file)) /
               kPageBytes;
    }
    return pages;
  }

  uint64_t done_ = 0, total_ = 0;
};

TEST_F(VerifyTest, APrefixIsVerifiedWithEverySegmentThatItNeeds) {
  const auto base = Iota(300), longer = Join(base, Iota(200, 5000));
  const auto branch = Join(Iota(100), Iota(50, 9000));
  const SegmentId a = Stored(base), b = Stored(longer), c = Stored(branch);
  const auto report = store_->Verify(&b, Watch());
  ASSERT_OK(report);
  EXPECT_TRUE(report->damaged.empty());
  EXPECT_EQ(report->covered, (std::vector<SegmentId>{a, b}));
  EXPECT_EQ(done_, total_);
  EXPECT_EQ(total_, Pages(report->covered));
  EXPECT_EQ(store_->Verify(&c, nullptr)->covered, (std::vector<SegmentId>{a, c}));
  EXPECT_EQ(store_->Verify(&a, nullptr)->covered, std::vector<SegmentId>{a});
}

TEST_F(VerifyTest, DamageToAParentIsFoundByWhatContinuesIt) {
  const auto base = Iota(300);
  const SegmentId a = Stored(base), b = Stored(Join(base, Iota(200, 5000)));
  FlipByte(FileOf(a), kPageBytes + 17);
  const auto report = store_->Verify(&b, nullptr);
  ASSERT_OK(report);
  ASSERT_EQ(report->damaged.size(), 1u);
  EXPECT_NE(report->damaged[0].find(a.ToString()), std::string::npos);
  EXPECT_EQ(report->covered, (std::vector<SegmentId>{a, b}));
  EXPECT_CODE(store_->OpenPrefix(b, 0), Code::kCorrupt);
  FlipByte(FileOf(a), kPageBytes + 17);
  EXPECT_TRUE(store_->Verify(&b, nullptr)->damaged.empty());  // and lifts its quarantine
  ExpectWhole(a, base);
}

TEST_F(VerifyTest, ATenantIsVerifiedWholeAndEachSegmentOnce) {
  const auto base = Iota(300), one = Join(base, Iota(50, 5000)), two = Join(one, Iota(50, 6000));
  const SegmentId root = Stored(base), branch = Stored(Join(Iota(100), Iota(90, 9000)));
  const SegmentId b = Stored(one), c = Stored(two);
  const auto compacted = store_->Compact(c, 1000);  // two names for one segment
  ASSERT_OK(compacted);
  ASSERT_OK(store_->Remove(root));  // no name of its own any more, and still needed
  ASSERT_OK(Put(*store_, model_, Iota(200, 20'000), "another tenant"));
  auto report = store_->VerifyTenant("t", Watch());
  ASSERT_OK(report);
  std::set<SegmentId> covered(report->covered.begin(), report->covered.end());
  EXPECT_EQ(covered, (std::set<SegmentId>{root, branch, *compacted}));
  EXPECT_EQ(report->covered.size(), covered.size());
  EXPECT_EQ(done_, total_);
  EXPECT_EQ(total_, Pages(report->covered));
  for (const SegmentId& name : {b, c}) {
    EXPECT_EQ(store_->Verify(&name, nullptr)->covered, (std::vector<SegmentId>{root, *compacted}));
  }
  EXPECT_EQ(store_->VerifyTenant("another tenant", nullptr)->covered.size(), 1u);
  EXPECT_TRUE(store_->VerifyTenant("nobody", nullptr)->covered.empty());
}

TEST_F(VerifyTest, ASegmentThatIsRemovedMeanwhileIsNoError) {
  std::vector<SegmentId> ids;
  for (uint32_t i = 0; i < 6; ++i) ids.push_back(Stored(Iota(300, i * 10'000)));
  const auto report = store_->VerifyTenant("t", Watch([&] {
                                             for (const SegmentId& id : ids)
                                               ASSERT_OK(store_->Remove(id));
                                           }));
  ASSERT_OK(report);
  EXPECT_TRUE(report->damaged.empty());
  EXPECT_GE(report->covered.size(), 2u);
  EXPECT_LT(report->covered.size(), ids.size());
  EXPECT_EQ(done_, total_);
  EXPECT_EQ(FilesIn(options_.dir / "segments"), 0u);
}

TEST_F(VerifyTest, WhatTakesThePlaceOfACompactedSegmentIsVerified) {
  const auto base = Iota(600), one = Join(base, Iota(60, 5000)), two = Join(one, Iota(40, 6000));
  const SegmentId root = Stored(base);
  Stored(one);
  const SegmentId leaf = Stored(two);
  SegmentId compacted;
  const auto report = store_->Verify(&leaf, Watch([&] {
    const auto made = store_->Compact(leaf, 100);
    ASSERT_OK(made);
    compacted = *made;
  }));
  ASSERT_OK(report);
  EXPECT_TRUE(report->damaged.empty());
  EXPECT_EQ(report->covered, (std::vector<SegmentId>{root, compacted}));
  EXPECT_EQ(done_, total_);
}

// What was not read is no damage: neither by a deadline, nor for want of memory.
TEST_F(VerifyTest, WhatEndsEarlyIsNotCalledDamaged) {
  const SegmentId a = Stored(Iota(300)), b = Stored(Iota(300, 5000));
  {
    CallLimits late;
    late.deadline = CallLimits::Clock::now();
    const CallScope scope(late);
    EXPECT_CODE(store_->Verify(&a, nullptr), Code::kDeadlineExceeded);
    EXPECT_CODE(store_->VerifyTenant("t", nullptr), Code::kDeadlineExceeded);
    EXPECT_CODE(store_->Verify(nullptr, nullptr), Code::kDeadlineExceeded);
  }
  EXPECT_EQ(store_->Verify(nullptr, nullptr)->covered.size(), 2u);
  EXPECT_FALSE(store_->GetPrefix(b)->quarantined);
}

// An error of the disk says nothing about the bytes: nobody is told that they are damaged, and they
// are served once the disk is well.
TEST_F(VerifyTest, WhatCannotBeReadIsNotCalledDamaged) {
  const auto tokens = Iota(300);
  const SegmentId a = Stored(tokens), b = Stored(Iota(300, 5000));
  ASSERT_OK(store_->PutBlob(a, "note", "maker", std::vector<std::byte>(500)));
  FlipByte(FileOf(b), kPageBytes + 17);
  store_.reset();
  const auto plan = std::make_shared<FaultPlan>();
  plan->reads_only = true;
  auto opened = OpenStoreWithEngine(options_, [&](std::unique_ptr<IoEngine> inner) {
    return std::make_unique<FaultyEngine>(std::move(inner), plan);
  });
  ASSERT_OK(opened);
  store_ = *std::move(opened);
  plan->Arm(Fault::kEio, 1, /*until_disarmed=*/true);
  const auto blind = store_->Verify(&a, nullptr);
  plan->Disarm();
  ASSERT_OK(blind);
  EXPECT_TRUE(blind->damaged.empty());
  EXPECT_TRUE(blind->covered.empty());
  ASSERT_EQ(blind->unread.size(), 2u);  // the rows and the blob
  EXPECT_NE(blind->unread[0].find(a.ToString()), std::string::npos) << blind->unread[0];
  EXPECT_NE(blind->unread[1].find("note"), std::string::npos) << blind->unread[1];
  EXPECT_FALSE(store_->GetPrefix(a)->quarantined);
  const auto seen = store_->Verify(nullptr, nullptr);
  ASSERT_OK(seen);
  EXPECT_TRUE(seen->unread.empty());
  EXPECT_EQ(seen->damaged.size(), 1u);
  EXPECT_EQ(seen->covered.size(), 2u);
  EXPECT_TRUE(store_->GetPrefix(b)->quarantined);
  EXPECT_EQ(store_->ListBlobs(a).size(), 1u);
  ExpectWhole(a, tokens);
}

TEST_F(VerifyTest, ItsTablesCountInTheTenantsMemory) {
  const auto memory = MemoryBudget::Create({.capacity = 1 << 30});
  options_.memory = memory;
  const SegmentId a = Stored(Iota(3000));
  Open();
  EXPECT_EQ(memory->used(MemoryKind::kTables), 0u);
  uint64_t most = 0;
  const auto watch = [&](uint64_t, uint64_t, std::string_view) {
    most = std::max(most, memory->used(MemoryKind::kTables));
    return true;
  };
  for (int kind = 0; kind < 3; ++kind) {
    const auto verify = [&] {
      if (kind == 0) return store_->Verify(&a, watch);
      return kind == 1 ? store_->VerifyTenant("t", watch) : store_->Verify(nullptr, watch);
    };
    most = 0;
    ASSERT_OK(verify());
    EXPECT_GE(most, 3000 * sizeof(uint32_t)) << kind;
    const MemoryCharge rest = memory->Shared().Charge(MemoryKind::kMessages, 1 << 30);
    EXPECT_CODE(verify(), Code::kResourceExhausted);
  }
  EXPECT_FALSE(store_->GetPrefix(a)->quarantined);
}

TEST_F(VerifyTest, CanBeStoppedAndRefusesWhatIsNotThere) {
  const SegmentId a = Stored(Iota(300));
  const auto stop = [](uint64_t, uint64_t, std::string_view) { return false; };
  EXPECT_CODE(store_->Verify(&a, stop), Code::kCancelled);
  EXPECT_CODE(store_->VerifyTenant("t", stop), Code::kCancelled);
  const SegmentId unknown{};
  EXPECT_CODE(store_->Verify(&unknown, nullptr), Code::kNotFound);
}

}  // namespace
}  // namespace prefixd::storage
