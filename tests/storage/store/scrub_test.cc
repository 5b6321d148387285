// Tests the scrub: the damage it finds, the blobs it deletes, where it continues; and the results
// of reads of damage.
#include <xxhash.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <numeric>

#include "storage/catalog/store_dir.h"
#include "storage/segment/unix_time.h"
#include "storage/store/open_store.h"
#include "storage/store/scrub.h"
#include "tests/storage/failing_catalog.h"
#include "tests/storage/open_store.h"

namespace prefixd::storage {
namespace {

using std::chrono::nanoseconds;

class ScrubTest : public OpenStoreTest {
 protected:
  void SetUp() override {
    options_.host_tier_bytes = 0;
    Open();
  }

  void Open() {
    OpenStoreTest::Open();
    ASSERT_NE(store_, nullptr);
    store_->OnBlobLost([this](const SegmentId& id, std::string_view name) {
      lost_.emplace_back(id, std::string(name));
    });
  }

  // Runs a pass over everything, whenever it was verified last; stops after `waits` sleeps.
  Result<int64_t> Pass(int waits = 1 << 30) {
    ScrubOptions options;
    options.bytes_per_second = 1ull << 40;
    options.interval_ms = 0;
    options.wait = [&, n = 0](nanoseconds) mutable { return n++ < waits; };
    return store_->Scrub(options);
  }

  std::vector<std::pair<SegmentId, std::string>> lost_;
};

TEST_F(ScrubTest, FindsDamageAndLiftsQuarantineWhenItIsGone) {
  const SegmentId a = Stored(Iota(300)), b = Stored(Iota(300, 5000));
  ASSERT_OK(Pass());
  EXPECT_EQ(store_->stats().scrub_damaged, 0u);
  EXPECT_GE(store_->stats().scrub_bytes, 2 * 25 * kPageBytes);
  FlipByte(FileOf(a), 3 * kPageBytes + 7);
  ASSERT_OK(Pass());
  EXPECT_EQ(store_->stats().scrub_damaged, 1u);
  const auto info = store_->GetPrefix(a);
  ASSERT_OK(info);
  EXPECT_TRUE(info->quarantined);
  EXPECT_NE(info->quarantine.find("page 3"), std::string::npos) << info->quarantine;
  EXPECT_FALSE(store_->GetPrefix(b)->quarantined);
  FlipByte(FileOf(a), 3 * kPageBytes + 7);
  ASSERT_OK(Pass());
  EXPECT_FALSE(store_->GetPrefix(a)->quarantined);
  EXPECT_EQ(store_->GetPrefix(a)->quarantine, "");
}

TEST_F(ScrubTest, OnlyWhatIsDueAndAtTheRateAskedFor) {
  Stored(Iota(2000));
  ScrubOptions options;
  options.wait = [](nanoseconds) { return true; };
  const int64_t now = NowUnixMs();
  const auto due = store_->Scrub(options);
  ASSERT_OK(due);
  EXPECT_EQ(store_->stats().scrub_bytes, 0u);
  EXPECT_GT(*due, now + options.interval_ms - 60'000);
  EXPECT_LE(*due, NowUnixMs() + options.interval_ms);
  // The scrub sleeps for the time that the bytes take at its rate, less the time that reading them
  // took.
  options.interval_ms = 0;
  options.bytes_per_second = 1000;
  nanoseconds longest{0};
  options.wait = [&](nanoseconds pause) {
    longest = std::max(longest, pause);
    return true;
  };
  ASSERT_OK(store_->Scrub(options));
  const uint64_t bytes = store_->stats().scrub_bytes;
  EXPECT_GT(bytes, 0u);
  const double seconds = std::chrono::duration<double>(longest).count();
  EXPECT_LE(seconds, double(bytes) / 1000);
  EXPECT_GT(seconds, double(bytes) / 1000 * 0.5);
  options.bytes_per_second = 0;
  EXPECT_CODE(store_->Scrub(options), Code::kInvalidArgument);
}

TEST_F(ScrubTest, GoesOnWhereItStoppedAlsoAfterARestart) {
  const SegmentId id = Stored(Iota(10'000));
  const uint64_t pages = std::filesystem::file_size(FileOf(id)) / kPageBytes;
  ASSERT_GT(pages, 600u);
  int calls = 0;
  for (; calls < 20; ++calls) {
    const auto pass = Pass(1);  // two windows each time
    if (pass.ok()) break;
    EXPECT_CODE(pass, Code::kCancelled);
    EXPECT_LE(store_->stats().scrub_bytes, 512 * kPageBytes);
    Open();
  }
  EXPECT_GE(calls, 1);
  EXPECT_LT(calls, 20);
  // The next pass, which begins anew, finds damage before the place where this one stopped.
  ASSERT_OK(Pass());
  FlipByte(FileOf(id), 2 * kPageBytes);
  ASSERT_OK(Pass());
  EXPECT_TRUE(store_->GetPrefix(id)->quarantined);
}

TEST_F(ScrubTest, TheLongestUnverifiedComesFirst) {
  const SegmentId a = Stored(Iota(100)), b = Stored(Iota(100, 5000));
  EXPECT_CODE(Pass(0), Code::kCancelled);  // `a`'s rows are read, its time is not written
  ASSERT_OK(Pass());
  Open();
  const int64_t since = store_->stats().verified_since_unix_ms;
  EXPECT_GT(since, store_->GetPrefix(b)->created_unix_ms - 1);
  EXPECT_LE(since, NowUnixMs());
  ASSERT_OK(store_->Remove(a));
  ASSERT_OK(Pass());
}

constexpr int64_t kDayMs = 24 * 3600'000;

// A catalog of a machine whose clock is days ahead.
class EarlyCatalog final : public FailingCatalog {
 public:
  using FailingCatalog::FailingCatalog;
  Status SetVerified(const SegmentId& id, int64_t unix_ms) override {
    return FailingCatalog::SetVerified(id, unix_ms + 3650 * kDayMs);
  }
};

// What was verified by a clock that was wrong was verified at no known time: it is due at once, and
// then after the interval as ever.
TEST_F(ScrubTest, TimesInTheFutureAreNoReasonToWait) {
  Stored(Iota(300));
  ASSERT_OK(Pass());
  store_.reset();
  ScrubOptions options;  // a week
  options.bytes_per_second = 1ull << 40;
  options.wait = [](nanoseconds) { return true; };
  {
    const auto early = OpenStoreCore(options_, nullptr, [](std::unique_ptr<Catalog> inner) {
      return std::make_unique<EarlyCatalog>(std::move(inner));
    });
    ASSERT_OK(early);
    ScrubOptions all = options;
    all.interval_ms = 0;
    ASSERT_OK(ScrubStore(**early, all));
  }
  Open();
  EXPECT_LE(store_->stats().verified_since_unix_ms, NowUnixMs());
  const auto due = store_->Scrub(options);
  ASSERT_OK(due);
  const uint64_t bytes = store_->stats().scrub_bytes;
  EXPECT_GT(bytes, 0u);
  EXPECT_LE(*due, NowUnixMs() + options.interval_ms);
  ASSERT_OK(store_->Scrub(options));
  EXPECT_EQ(store_->stats().scrub_bytes, bytes);
}

// The clock is set back while the store is open, as NTP does soon after a start.
TEST_F(ScrubTest, AClockThatIsSetBackMakesAllDue) {
  Stored(Iota(300));
  store_.reset();
  const auto core = OpenStoreCore(options_, nullptr, nullptr);
  ASSERT_OK(core);
  ScrubOptions options;
  options.bytes_per_second = 1ull << 40;
  options.wait = [](nanoseconds) { return true; };
  ASSERT_OK(ScrubStore(**core, options));
  EXPECT_EQ((*core)->counters.scrub_bytes, 0u);
  (*core)->scrub_clock_ms = (*core)->last_verified_ms = NowUnixMs() + 10 * kDayMs;
  const auto due = ScrubStore(**core, options);
  ASSERT_OK(due);
  const uint64_t bytes = (*core)->counters.scrub_bytes;
  EXPECT_GT(bytes, 0u);
  EXPECT_LE(*due, NowUnixMs() + options.interval_ms);
  ASSERT_OK(ScrubStore(**core, options));
  EXPECT_EQ((*core)->counters.scrub_bytes, bytes);
}

TEST_F(ScrubTest, DamagedBlobsAreDeletedAndAnnounced) {
  const SegmentId id = Stored(Iota(64));
  const std::vector<std::byte> bytes(500, std::byte{3});
  const auto damage = [&](const char* name) {
    ASSERT_OK(store_->PutBlob(id, name, "p", bytes));
    FlipByte(BlobPath(options_.dir, id, name), 200);
  };
  damage("scrubbed");
  const uint64_t before = store_->stats().bytes_on_disk;
  ASSERT_OK(Pass());
  EXPECT_LT(store_->stats().bytes_on_disk, before);
  damage("read");
  EXPECT_CODE(store_->GetBlob(id, "read", "p"), Code::kCorrupt);
  EXPECT_CODE(store_->GetBlob(id, "read", "p"), Code::kNotFound);
  damage("verified");
  EXPECT_EQ(store_->Verify(nullptr, nullptr)->damaged.size(), 1u);
  ASSERT_EQ(lost_.size(), 3u);
  EXPECT_EQ(lost_[0], std::pair(id, std::string("scrubbed")));
  EXPECT_EQ(lost_[1].second, "read");
  EXPECT_EQ(lost_[2].second, "verified");
  EXPECT_TRUE(store_->ListBlobs(id).empty());
  // The flip hit a blob alone: the rows are sound.
  EXPECT_FALSE(store_->GetPrefix(id)->quarantined);
  // A blob of a newer format is refused, and left for the prefixd that wrote it.
  ASSERT_OK(store_->PutBlob(id, "newer", "p", bytes));
  const auto path = BlobPath(options_.dir, id, "newer");
  std::string file(std::filesystem::file_size(path), 0);
  std::ifstream(path, std::ios::binary).read(file.data(), std::streamsize(file.size()));
  file[8] = 9;                              // version
  std::fill_n(file.begin() + 56, 8, '\0');  // checksum
  const uint64_t sum = XXH3_64bits(file.data(), file.size());
  std::memcpy(file.data() + 56, &sum, sizeof(sum));
  std::ofstream(path, std::ios::binary) << file;
  EXPECT_CODE(store_->GetBlob(id, "newer", "p"), Code::kFailedPrecondition);
  ASSERT_OK(Pass());
  EXPECT_EQ(lost_.size(), 3u);
  EXPECT_TRUE(std::filesystem::exists(path));
}

TEST_F(ScrubTest, DoesNotStandInTheWayOfRemovalsAndRewrites) {
  const SegmentId a = Stored(Iota(1000)), b = Stored(Iota(1000, 5000));
  ReclusterOptions recluster;
  recluster.order = [row = model_.geometry.row(0).bytes()](
                        uint32_t, uint32_t, uint32_t,
                        std::span<const std::byte> rows) -> Result<std::vector<uint32_t>> {
    std::vector<uint32_t> order(rows.size() / row);
    std::iota(order.rbegin(), order.rend(), 0);
    return order;
  };
  ScrubOptions options;
  options.interval_ms = 0;
  options.bytes_per_second = 1ull << 40;
  options.wait = [&, n = 0](nanoseconds) mutable {
    if (n++ == 0) {
      EXPECT_TRUE(store_->Remove(a).ok());
      EXPECT_TRUE(store_->Recluster(b, recluster).ok());
    }
    return true;
  };
  ASSERT_OK(store_->Scrub(options));
  EXPECT_EQ(store_->stats().scrub_damaged, 0u);
  EXPECT_FALSE(store_->GetPrefix(b)->quarantined);
}

// The test reads one damaged store by match, open, an open session, another prefix, and a new put.
TEST_F(ScrubTest, WhatReadersOfADamagedPrefixGet) {
  const auto tokens = Iota(300), apart = Iota(300, 9000);
  const SegmentId id = Stored(tokens), sound = Stored(apart);
  const auto open = store_->OpenPrefix(id, 0);
  ASSERT_OK(open);
  EXPECT_EQ(Compare(**open, tokens).value(), "");
  FlipByte(FileOf(id), kPageBytes + 3);  // layer 0, KV head 0, the first tokens
  std::vector<std::byte> rows(20 * model_.geometry.row(0).bytes());
  EXPECT_CODE((*open)->ReadRange(0, 0, {0, 20}, rows, nullptr), Code::kCorrupt);
  EXPECT_TRUE((*open)->ReadRange(1, 1, {0, 20}, rows, nullptr).ok());  // verified by itself
  EXPECT_CODE(store_->OpenPrefix(id, 0), Code::kCorrupt);
  EXPECT_EQ(store_->LongestMatch("m", "t", tokens)->n_tokens, 0u);
  EXPECT_EQ(Compare(**store_->OpenPrefix(sound, 0), apart).value(), "");
  const SegmentId anew = Stored(tokens);
  EXPECT_NE(anew, id);
  EXPECT_EQ(store_->LongestMatch("m", "t", tokens)->id, anew);
  EXPECT_EQ(Compare(**store_->OpenPrefix(anew, 0), tokens).value(), "");
  EXPECT_EQ(store_->ListPrefixes().size(), 3u);  // the damaged segments stay until they are removed
}

}  // namespace
}  // namespace prefixd::storage
