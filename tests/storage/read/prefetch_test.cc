// Tests prefetched rows: prefetch stops whatever the disk does, reads few rows at a time, and is
// counted in any case.
#include <atomic>
#include <chrono>
#include <thread>

#include "tests/storage/open_store.h"
#include "tests/storage/read/page_rows_fixture.h"

namespace prefixd::storage {
namespace {

class StoragePrefetchTest : public PageRowsTest {
 protected:
  static constexpr uint64_t kAtATime = 4;  // pages

  StoragePrefetchTest() : PageRowsTest(600) {}
  void SetUp() override {
    options_.host_tier_bytes = 4 << 20;
    Open();
  }

  Status Ahead(std::span<const uint32_t> ids, uint64_t max_bytes = 1 << 20) {
    return prefix_->Prefetch(0, 0, ids, RowPart::kRow, max_bytes, stop_, &stats_);
  }

  void WaitForHeld() const {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (engine_->held() == 0) {
      ASSERT_LT(std::chrono::steady_clock::now(), end) << "nothing was read";
      std::this_thread::yield();
    }
  }

  const std::vector<uint32_t> ids_ = {10, 20, 30, 40, 50, 60, 70, 80, 90, 100};
  std::atomic<bool> stop_{false};
};

TEST_F(StoragePrefetchTest, EndsThoughTheDiskIsSilent) {
  plan_->Arm(Fault::kHang, 1, true);
  Status status;
  std::thread reader([&] { status = Ahead(ids_); });
  WaitForHeld();
  stop_ = true;
  reader.join();
  EXPECT_CODE(status, Code::kCancelled);
  EXPECT_EQ(engine_->held(), kAtATime);  // the disk still has them
  EXPECT_EQ(ssd_pages(), 0u);
  plan_->Disarm();
  engine_->Release();
  EXPECT_EQ(store_->stats().prefetched_bytes, 0u);
  EXPECT_EQ(store_->stats().host_tier_bytes, 0u);

  stop_ = false;
  ASSERT_OK(Ahead(ids_));
  EXPECT_EQ(ssd_pages(), ids_.size());
  EXPECT_EQ(store_->stats().prefetched_bytes, ids_.size() * kPageBytes);
}

// A caller that waits for rows gets an error when the disk does not answer in time; no caller waits
// for a prefetch.
TEST_F(StoragePrefetchTest, HasNoDeadline) {
  options_.read_deadline_ms = 3000;  // a working disk is never this slow, however busy
  ASSERT_NO_FATAL_FAILURE(Open());
  plan_->Arm(Fault::kHang, 1, true);
  Status status;
  std::thread reader([&] { status = Ahead(ids_); });
  WaitForHeld();
  // The later read gives up: its time is spent behind the earlier ones.
  std::vector<std::byte> row(model_.geometry.row(0).bytes());
  EXPECT_CODE(prefix_->ReadRows(0, 0, std::vector<uint32_t>{500}, row, nullptr),
              Code::kUnavailable);
  plan_->Disarm();
  engine_->Release();
  reader.join();
  ASSERT_OK(status);
  EXPECT_EQ(ssd_pages(), ids_.size());
  EXPECT_EQ(store_->stats().prefetched_bytes, ids_.size() * kPageBytes);
}

TEST_F(StoragePrefetchTest, ReadsNoMoreThanItMay) {
  ASSERT_OK(Ahead(ids_, 7 * kPageBytes + 5));
  EXPECT_EQ(ssd_pages(), 7u);
}

TEST_F(StoragePrefetchTest, WhatDoesNotVerifyIsCounted) {
  plan_->Arm(Fault::kFlip, 1, true);
  EXPECT_CODE(Ahead(ids_), Code::kCorrupt);
  plan_->Disarm();
  const PrefixStore::Stats stats = store_->stats();
  EXPECT_EQ(ssd_pages(), kAtATime);
  EXPECT_EQ(stats.prefetched_bytes, kAtATime * kPageBytes);
  EXPECT_EQ(stats.prefetch_wasted_bytes, stats.prefetched_bytes);
  EXPECT_EQ(stats.host_tier_bytes, 0u);
}

TEST_F(StoragePrefetchTest, EndsWhereTheTierHasNoRoom) {
  options_.host_tier_bytes = 64 * kPageBytes;
  ASSERT_NO_FATAL_FAILURE(Open());
  std::vector<uint32_t> many(200);
  std::iota(many.begin(), many.end(), 200);
  RowViews views;
  ASSERT_OK(prefix_->ViewRows(0, 0, many, RowPart::kRow, views, nullptr));  // this pins them too
  EXPECT_CODE(Ahead(ids_), Code::kResourceExhausted);
  EXPECT_EQ(ssd_pages(), kAtATime);
  EXPECT_EQ(store_->stats().prefetch_wasted_bytes, kAtATime * kPageBytes);
  views = {};
  ASSERT_OK(Ahead(ids_));
}

TEST_F(StoragePrefetchTest, WaitsForStepsToReadTheOrder) {
  ASSERT_OK(store_->Recluster(id_, Reversed(model_.geometry.row(0).bytes())));
  ASSERT_NO_FATAL_FAILURE(Open());
  const uint64_t before = plan_->counted;
  ASSERT_OK(Ahead(ids_));
  EXPECT_EQ(plan_->counted, before);
  EXPECT_EQ(ssd_pages(), 0u);
  std::vector<std::byte> row(model_.geometry.row(0).bytes());
  ASSERT_OK(prefix_->ReadRows(0, 0, std::vector<uint32_t>{500}, row, nullptr));
  ASSERT_OK(Ahead(ids_));
  EXPECT_GT(ssd_pages(), 0u);
}

}  // namespace
}  // namespace prefixd::storage
