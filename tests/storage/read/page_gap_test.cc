// Tests that pages of single rows that lie close are read together, with the pages between them.
#include "tests/storage/read/page_rows_fixture.h"

namespace prefixd::storage {
namespace {

class PageGapTest : public PageRowsTest {
 protected:
  PageGapTest() : PageRowsTest(1600) {}

  void Open(uint32_t max_gap, uint64_t host_tier = 0) {
    options_.max_gap_pages = max_gap;
    options_.host_tier_bytes = host_tier;
    PageRowsTest::Open();
  }

  // Reads rows and checks them.
  void Read(std::span<const uint32_t> ids) {
    stats_ = {};
    const uint64_t before = plan_->counted;
    const size_t row = model_.geometry.row(0).bytes();
    std::vector<std::byte> rows(ids.size() * row), want(row);
    ASSERT_OK(prefix_->ReadRows(0, 0, ids, rows, &stats_));
    operations_ = plan_->counted - before;
    const auto states = States(tokens_);
    for (size_t i = 0; i < ids.size(); ++i) {
      FillRow(states[ids[i]], 0, 0, want);
      ASSERT_EQ(std::memcmp(want.data(), &rows[i * row], row), 0) << ids[i];
    }
  }

  uint64_t operations_ = 0;
};

TEST_F(PageGapTest, SmallGapsAreBridgedAndCounted) {
  const std::vector<uint32_t> ids = {0, 2, 5, 9, 10};  // gaps of 1, 2, 3 and 0 pages
  struct Case {
    uint32_t gap;
    uint64_t operations, pages;
  };
  for (const Case& c : {Case{0, 4, 5}, Case{1, 3, 6}, Case{2, 2, 8}, Case{3, 1, 11}}) {
    Open(c.gap);
    const uint64_t before = store_->stats().bytes_read;
    Read(ids);
    EXPECT_EQ(operations_, c.operations) << c.gap;
    EXPECT_EQ(ssd_pages(), c.pages) << c.gap;
    EXPECT_EQ(stats_.pages_ssd, 5u);  // requested pages
    EXPECT_EQ(store_->stats().bytes_read - before, c.pages * kPageBytes);
  }
}

TEST_F(PageGapTest, AnyPatternReadsTheSame) {
  std::mt19937_64 rng(Seed("PageGapTest.AnyPatternReadsTheSame"));
  for (const uint32_t gap : {0u, 1u, 2u, 16u}) {
    Open(gap);
    for (const uint32_t percent : {3u, 20u, 50u, 90u, 100u}) {
      std::vector<uint32_t> ids;
      for (uint32_t t = 0; t < 1600; ++t) {
        if (rng() % 100 < percent) ids.push_back(t);
      }
      Read(ids);
      EXPECT_EQ(stats_.pages_ssd, ids.size());
      EXPECT_LE(ssd_pages(), ids.size() * (1 + gap));
    }
  }
}

TEST_F(PageGapTest, WhatLiesBetweenIsNeitherJudgedNorKept) {
  Open(2);
  prefix_.reset();
  store_.reset();
  const auto path = options_.dir / "segments" / (id_.ToString() + ".seg");
  FlipByte(path, (1 + 11) * kPageBytes + 7);  // the row of token 11
  Open(2, 16 << 20);
  Read(std::vector<uint32_t>{10, 12});
  EXPECT_EQ(operations_, 1u);
  EXPECT_EQ(store_->stats().checksum_failures, 0u);
  EXPECT_FALSE(store_->GetPrefix(id_)->quarantined);
  Read(std::vector<uint32_t>{10, 12});
  EXPECT_EQ(operations_, 0u);
  EXPECT_EQ(stats_.pages_host, 2u);
  std::vector<std::byte> row(4096);
  EXPECT_CODE(prefix_->ReadRows(0, 0, std::vector<uint32_t>{11}, row, nullptr), Code::kCorrupt);
}

TEST_F(PageGapTest, ABadSectorBetweenFailsNothing) {
  Open(2);
  plan_->bad_sector = int64_t{1 + 11} * kPageBytes + 7;  // in the page of token 11
  Read(std::vector<uint32_t>{10, 12, 30});
  std::vector<std::byte> row(4096);
  EXPECT_CODE(prefix_->ReadRows(0, 0, std::vector<uint32_t>{11}, row, nullptr), Code::kIo);
  EXPECT_FALSE(store_->GetPrefix(id_)->quarantined);
}

TEST_F(PageGapTest, ADamagedPageAmongOthersIsReadAgainAlone) {
  Open(2);
  plan_->Arm(Fault::kFlip, 1, false);  // the middle of the first operation's bytes
  Read(std::vector<uint32_t>{20, 22, 24});
  EXPECT_EQ(operations_, 2u);
  EXPECT_EQ(store_->stats().checksum_failures, 1u);
}

TEST_F(PageGapTest, ImpossibleGapsAreRefused) {
  options_.max_gap_pages = 17;
  EXPECT_CODE(PrefixStore::Open(options_), Code::kInvalidArgument);
}

}  // namespace
}  // namespace prefixd::storage
