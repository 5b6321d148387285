// Tests what a start brings back into the host tier: what was used last, as far as there is room.
#include <atomic>
#include <chrono>
#include <thread>

#include "tests/storage/open_store.h"
#include "tests/storage/prompts.h"

namespace prefixd::storage {
namespace {

class WarmUpTest : public OpenStoreTest {
 protected:
  WarmUpTest() { options_.host_tier_bytes = 4 << 20; }

  // Puts prompts one after the other, the last one used last.
  void PutSome(uint32_t n, uint32_t tokens, const std::string& tenant = "t") {
    for (uint32_t i = 0; i < n; ++i) {
      prompts_.push_back(Prompt(static_cast<uint32_t>(1 + prompts_.size()), tokens));
      const auto id = Put(*store_, model_, prompts_.back(), tenant);
      ASSERT_OK(id);
      ids_.push_back(*id);
      std::this_thread::sleep_for(std::chrono::milliseconds(3));
    }
  }
  WarmedUp Warm() {
    const auto warmed = store_->WarmUp({.stop = &stop_, .rest = [this] { ++rests_; }});
    EXPECT_OK(warmed);
    return warmed.ok() ? *warmed : WarmedUp();
  }
  // Reads all rows of a prompt; returns how many pages came from the disk.
  uint64_t PagesFromDisk(size_t i) {
    const auto prefix = store_->OpenPrefix(ids_[i], 0);
    EXPECT_OK(prefix);
    if (!prefix.ok()) return UINT64_MAX;
    ReadStats stats;
    const auto differs = Compare(**prefix, prompts_[i], &stats);
    EXPECT_OK(differs);
    EXPECT_EQ(differs.ok() ? *differs : "", "");
    return stats.pages_ssd;
  }

  std::atomic<bool> stop_{false};
  int rests_ = 0;
  std::vector<Tokens> prompts_;
  std::vector<SegmentId> ids_;
};

TEST_F(WarmUpTest, WhatIsStoredComesFromMemoryBehindIt) {
  Open();
  PutSome(3, 500);
  PutSome(2, 100, "another tenant");
  // The second one of these begins with the first one's tokens.
  prompts_.push_back(Join(prompts_[0], Prompt(77, 300)));
  ids_.push_back(Stored(prompts_.back()));
  Open();
  const WarmedUp warmed = Warm();
  EXPECT_GT(warmed.bytes, 0u);
  EXPECT_GT(rests_, 0);
  EXPECT_EQ(store_->stats().warmed_bytes, warmed.bytes);
  EXPECT_EQ(store_->stats().host_tier_bytes, warmed.bytes);
  for (size_t i = 0; i < ids_.size(); ++i) EXPECT_EQ(PagesFromDisk(i), 0u) << i;
  // Nothing is read twice.
  EXPECT_EQ(Warm().bytes, 0u);
  EXPECT_EQ(store_->stats().warmed_bytes, warmed.bytes);
}

TEST_F(WarmUpTest, WhatWasUsedLastComesFirstAndNothingMakesRoom) {
  options_.host_tier_bytes = 1 << 20;
  Open();
  PutSome(8, 1000);  // 320 KB each
  Open();
  ASSERT_GT(PagesFromDisk(0), 0u);  // somebody was faster
  const WarmedUp warmed = Warm();
  EXPECT_LE(warmed.bytes, 1u << 20);
  EXPECT_GE(warmed.prefixes, 1u);
  EXPECT_EQ(store_->stats().host_evictions, 0u);
  EXPECT_EQ(PagesFromDisk(0), 0u);
  EXPECT_EQ(PagesFromDisk(7), 0u);
  EXPECT_GT(PagesFromDisk(1), 0u);
}

TEST_F(WarmUpTest, GoesOnBehindWhatIsDamagedOrGone) {
  Open();
  PutSome(4, 300);
  store_.reset();
  FlipByte(FileOf(ids_[3]), 2 * kPageBytes + 17);
  Open();
  ASSERT_OK(store_->Remove(ids_[2]));
  EXPECT_EQ(Warm().prefixes, 2u);
  EXPECT_EQ(PagesFromDisk(0), 0u);
  EXPECT_EQ(PagesFromDisk(1), 0u);
  EXPECT_TRUE(store_->GetPrefix(ids_[3])->quarantined);
}

TEST_F(WarmUpTest, EndsWhenItIsToldTo) {
  Open();
  PutSome(2, 2000);
  Open();
  const auto ended = store_->WarmUp({.stop = &stop_, .rest = [this] { stop_ = ++rests_ == 2; }});
  EXPECT_CODE(ended, Code::kCancelled);
  EXPECT_EQ(rests_, 2);
  stop_ = false;
  Warm();
  EXPECT_EQ(PagesFromDisk(0) + PagesFromDisk(1), 0u);
  EXPECT_CODE(store_->WarmUp({}), Code::kInvalidArgument);
}

TEST_F(WarmUpTest, LetsGoOfWhatSomebodyWantsGone) {
  Open();
  PutSome(2, 2000);
  Open();
  Status removed = Error{Code::kInternal, "not tried"};
  std::atomic<bool> gone{false};
  std::thread remover;
  const auto warmed = store_->WarmUp({.stop = &stop_, .rest = [&] {
                                        if (++rests_ > 1) {
                                          // Longer than a removal waits, if the prefix were still
                                          // held.
                                          if (!gone)
                                            std::this_thread::sleep_for(std::chrono::seconds(3));
                                          return;
                                        }
                                        remover = std::thread([&] {
                                          removed = store_->Remove(ids_[1]);
                                          gone = true;
                                        });
                                        std::this_thread::sleep_for(std::chrono::milliseconds(200));
                                      }});
  ASSERT_TRUE(remover.joinable());
  remover.join();
  EXPECT_OK(removed);
  ASSERT_OK(warmed);
  EXPECT_GE(warmed->prefixes, 1u);
  EXPECT_EQ(PagesFromDisk(0), 0u);
  EXPECT_CODE(store_->GetPrefix(ids_[1]), Code::kNotFound);
}

TEST_F(WarmUpTest, AStoreWithoutAHostTierReadsNothing) {
  options_.host_tier_bytes = 0;
  Open();
  PutSome(1, 300);
  Open();
  EXPECT_EQ(Warm().bytes, 0u);
  EXPECT_EQ(rests_, 0);
}

}  // namespace
}  // namespace prefixd::storage
