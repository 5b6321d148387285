// Rows read ahead of somebody who may want them: stopped whatever the disk does, few at a time, and
// counted in any case.
#include <chrono>
#include <thread>

#include "storage/store_core.h"
#include "tests/storage/faulty_engine.h"
#include "tests/storage/open_store.h"

namespace prefixd::storage {
namespace {

class ReadAheadTest : public ::testing::Test {
 protected:
  static constexpr uint64_t kAtATime = 4;  // pages

  void Open() {
    prefix_.reset();
    store_.reset();
    auto opened = OpenStoreWithEngine(options_, [this](std::unique_ptr<IoEngine> inner) {
      auto engine = std::make_unique<FaultyEngine>(std::move(inner), plan_);
      engine_ = engine.get();
      return engine;
    });
    ASSERT_OK(opened);
    store_ = std::move(*opened);
    ASSERT_OK(store_->PutModel(model_));
    if (id_ == SegmentId{}) {
      const auto id = Put(*store_, model_, tokens_);
      ASSERT_OK(id);
      id_ = *id;
    }
    auto prefix = store_->OpenPrefix(id_, 0);
    ASSERT_OK(prefix);
    prefix_ = *prefix;
  }
  void SetUp() override {
    options_.host_tier_bytes = 4 << 20;
    Open();
  }

  Status Ahead(std::span<const uint32_t> ids, uint64_t max_bytes = 1 << 20) {
    return prefix_->ReadAhead(0, 0, ids, RowPart::kRow, max_bytes, stop_, &stats_);
  }
  uint64_t ssd_pages() const { return stats_.bytes[static_cast<size_t>(Tier::kSsd)] / kPageBytes; }

  void WaitForHeld() const {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (engine_->held() == 0) {
      ASSERT_LT(std::chrono::steady_clock::now(), end) << "nothing was read";
      std::this_thread::yield();
    }
  }

  TempDir dir_;
  StoreOptions options_ = TestOptions(dir_.path());
  // One row fills one page.
  ModelRecord model_ = TestModel("m", TestGeometry(1, 1, 512, DType::kF32));
  const std::vector<uint32_t> tokens_ = Iota(600);
  const std::vector<uint32_t> ids_ = {10, 20, 30, 40, 50, 60, 70, 80, 90, 100};
  const std::shared_ptr<FaultPlan> plan_ = std::make_shared<FaultPlan>();
  FaultyEngine* engine_ = nullptr;
  SegmentId id_;
  std::unique_ptr<PrefixStore> store_;
  std::shared_ptr<const StoredPrefix> prefix_;
  std::atomic<bool> stop_{false};
  ReadStats stats_;
};

TEST_F(ReadAheadTest, EndsThoughTheDiskIsSilent) {
  plan_->Arm(Fault::kHang, 1, true);
  Status status;
  std::thread reader([&] { status = Ahead(ids_); });
  WaitForHeld();
  stop_ = true;
  reader.join();
  EXPECT_CODE(status, Code::kCancelled);
  EXPECT_EQ(engine_->held(), kAtATime);  // the disk's still
  EXPECT_EQ(ssd_pages(), 0u);
  plan_->Disarm();
  engine_->Release();
  EXPECT_EQ(store_->stats().ahead_bytes, 0u);
  EXPECT_EQ(store_->stats().host_tier_bytes, 0u);

  stop_ = false;
  ASSERT_OK(Ahead(ids_));
  EXPECT_EQ(ssd_pages(), ids_.size());
  EXPECT_EQ(store_->stats().ahead_bytes, ids_.size() * kPageBytes);
}

TEST_F(ReadAheadTest, ReadsNoMoreThanItMay) {
  ASSERT_OK(Ahead(ids_, 7 * kPageBytes + 5));
  EXPECT_EQ(ssd_pages(), 7u);
}

TEST_F(ReadAheadTest, WhatDoesNotVerifyIsCounted) {
  plan_->Arm(Fault::kFlip, 1, true);
  EXPECT_CODE(Ahead(ids_), Code::kCorrupt);
  plan_->Disarm();
  const PrefixStore::Stats stats = store_->stats();
  EXPECT_EQ(ssd_pages(), kAtATime);
  EXPECT_EQ(stats.ahead_bytes, kAtATime * kPageBytes);
  EXPECT_EQ(stats.ahead_vain_bytes, stats.ahead_bytes);
  EXPECT_EQ(stats.host_tier_bytes, 0u);
}

TEST_F(ReadAheadTest, EndsWhereTheTierHasNoRoom) {
  options_.host_tier_bytes = 64 * kPageBytes;
  ASSERT_NO_FATAL_FAILURE(Open());
  std::vector<uint32_t> many(200);
  std::iota(many.begin(), many.end(), 200);
  RowViews views;
  ASSERT_OK(prefix_->ViewRows(0, 0, many, RowPart::kRow, views, nullptr));  // and pins them
  EXPECT_CODE(Ahead(ids_), Code::kResourceExhausted);
  EXPECT_EQ(ssd_pages(), kAtATime);
  EXPECT_EQ(store_->stats().ahead_vain_bytes, kAtATime * kPageBytes);
  views = {};
  ASSERT_OK(Ahead(ids_));
}

TEST_F(ReadAheadTest, WaitsForStepsToReadTheOrder) {
  ASSERT_OK(store_->Settle(id_, Reversed(model_.geometry.row().bytes())));
  ASSERT_NO_FATAL_FAILURE(Open());
  const uint64_t before = plan_->counted;
  ASSERT_OK(Ahead(ids_));
  EXPECT_EQ(plan_->counted, before);
  EXPECT_EQ(ssd_pages(), 0u);
  std::vector<std::byte> row(model_.geometry.row().bytes());
  ASSERT_OK(prefix_->ReadRows(0, 0, std::vector<uint32_t>{500}, row, nullptr));
  ASSERT_OK(Ahead(ids_));
  EXPECT_GT(ssd_pages(), 0u);
}

}  // namespace
}  // namespace prefixd::storage
