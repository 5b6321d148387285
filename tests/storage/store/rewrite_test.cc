// Tests reclustering and compacting: the same rows in other places, under the same names.
#include <algorithm>
#include <filesystem>
#include <numeric>
#include <random>
#include <set>
#include <thread>

#include "storage/catalog/store_dir.h"
#include "tests/storage/open_store.h"

namespace prefixd::storage {
namespace {

// A random order suffices: these tests check that rows are found again.
ReclusterOptions RandomOrder(uint32_t chunk_tokens, uint64_t seed, size_t row_bytes) {
  ReclusterOptions options;
  options.chunk_tokens = chunk_tokens;
  options.order = [rng = std::mt19937_64(seed), row_bytes](
                      uint32_t, uint32_t, uint32_t,
                      std::span<const std::byte> rows) mutable -> Result<std::vector<uint32_t>> {
    std::vector<uint32_t> order(rows.size() / row_bytes);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), rng);
    return order;
  };
  return options;
}

class RewriteTest : public OpenStoreTest {
 protected:
  RewriteTest() { Open(); }

  // Checks that keys and values alone, by ids and by range, are the halves of the rows.
  void ExpectParts(const SegmentId& id) {
    const auto opened = store_->OpenPrefix(id, 0);
    ASSERT_OK(opened);
    const StoredPrefix& prefix = **opened;
    const RowShape row = model_.geometry.row(0);
    const uint32_t n = prefix.n_tokens();
    std::vector<uint32_t> ids;
    for (uint32_t t = 1; t < n; t += 3) ids.push_back(t);
    std::vector<std::byte> whole(n * row.bytes()), part(n * 64), some(ids.size() * 64);
    for (uint32_t run = 0; run < model_.geometry.n_layers * model_.geometry.n_kv_heads; ++run) {
      const uint32_t l = run / model_.geometry.n_kv_heads, h = run % model_.geometry.n_kv_heads;
      ASSERT_OK(prefix.ReadRange(l, h, {0, n}, whole, nullptr));
      for (const RowPart p : {RowPart::kKey, RowPart::kValue}) {
        const size_t bytes = PartBytes(row, p), skip = p == RowPart::kKey ? 0 : row.key_bytes();
        ASSERT_OK(prefix.ReadRange(l, h, {0, n}, p, {part, 64}, nullptr));
        ASSERT_OK(prefix.ReadRows(l, h, ids, p, {some, 64}, nullptr));
        for (uint32_t t = 0; t < n; ++t) {
          ASSERT_EQ(std::memcmp(part.data() + t * 64, whole.data() + t * row.bytes() + skip, bytes),
                    0);
        }
        for (size_t i = 0; i < ids.size(); ++i) {
          ASSERT_EQ(
              std::memcmp(some.data() + i * 64, whole.data() + ids[i] * row.bytes() + skip, bytes),
              0);
        }
      }
    }
  }

  const size_t row_bytes_ = model_.geometry.row(0).bytes();
};

TEST_F(RewriteTest, ReclusteredRowsReadTheSame) {
  const uint64_t seed = Seed("RewriteTest.ReclusteredRowsReadTheSame");
  for (const uint32_t chunk : {1u, 50u, 64u, 4096u}) {
    const auto tokens = Iota(333, chunk * 10'000);
    const SegmentId id = Stored(tokens);
    ASSERT_OK(store_->Recluster(id, RandomOrder(chunk, seed + chunk, row_bytes_)));
    EXPECT_TRUE(store_->GetPrefix(id)->reclustered);
    ExpectWhole(id, tokens);
    ExpectParts(id);
    Open();
    EXPECT_TRUE(store_->GetPrefix(id)->reclustered);
    ExpectWhole(id, tokens);
    const auto report = store_->Verify(&id, nullptr);
    ASSERT_OK(report);
    EXPECT_TRUE(report->damaged.empty());
    EXPECT_EQ(store_->LongestMatch("m", "t", tokens)->n_tokens, 333u);
    ASSERT_OK(store_->Recluster(id, RandomOrder(chunk, seed, row_bytes_)));  // nothing to do
  }
  EXPECT_EQ(FilesIn(options_.dir / "segments"), 4u);  // the old files are gone
}

TEST_F(RewriteTest, ReadersKeepTheirFileAndBranchesFindTheirs) {
  const auto base = Iota(100), longer = Join(base, Iota(80, 5000));
  const auto branch = Join(Iota(40), Iota(60, 9000));
  const SegmentId a = Stored(base), b = Stored(longer), c = Stored(branch);
  const auto open = store_->OpenPrefix(b, 0);
  ASSERT_OK(open);
  for (const SegmentId& id : {a, b, c}) {
    ASSERT_OK(store_->Recluster(id, RandomOrder(32, 1, row_bytes_)));
  }
  EXPECT_EQ(*Compare(**open, longer), "");  // from the files it has open
  ExpectWhole(a, base);
  ExpectWhole(b, longer);
  ExpectWhole(c, branch);
  const auto stats = store_->stats();
  EXPECT_EQ(stats.reclustered, 3u);
  EXPECT_GT(stats.bytes_rewritten, 0u);
  EXPECT_LT(stats.bytes_rewritten, stats.bytes_written);
}

TEST_F(RewriteTest, ReadsGoOnWhileSettling) {
  const auto tokens = Iota(600);
  const SegmentId id = Stored(tokens);
  std::thread reader([&] {
    for (int i = 0; i < 60; ++i) ExpectWhole(id, tokens);
  });
  ASSERT_OK(store_->Recluster(id, RandomOrder(128, 2, row_bytes_)));
  reader.join();
  EXPECT_FALSE(store_->GetPrefix(id)->quarantined);
}

TEST_F(RewriteTest, AFailedOrderOrAStopChangesNothing) {
  const auto tokens = Iota(200);
  const SegmentId id = Stored(tokens);
  ReclusterOptions bad = RandomOrder(64, 3, row_bytes_);
  bad.order = [](uint32_t, uint32_t, uint32_t, auto) -> Result<std::vector<uint32_t>> {
    return std::vector<uint32_t>(64, 0);
  };
  EXPECT_CODE(store_->Recluster(id, bad), Code::kInvalidArgument);
  ReclusterOptions stopped = RandomOrder(64, 3, row_bytes_);
  stopped.progress = [](uint64_t done, uint64_t total, std::string_view) {
    EXPECT_LE(done, total);
    return done < total / 2;
  };
  EXPECT_CODE(store_->Recluster(id, stopped), Code::kCancelled);
  EXPECT_CODE(store_->Recluster(id, {0, bad.order, nullptr}), Code::kInvalidArgument);
  EXPECT_CODE(store_->Recluster(SegmentId{}, bad), Code::kNotFound);
  EXPECT_FALSE(store_->GetPrefix(id)->reclustered);
  EXPECT_EQ(FilesIn(options_.dir / "segments"), 1u);
  ExpectWhole(id, tokens);
}

TEST_F(RewriteTest, DamageInAReclusteredSegmentIsNeverServed) {
  std::mt19937_64 rng(Seed("RewriteTest.DamageInASettledSegment"));
  options_.host_tier_bytes = 0;
  Open();
  const auto tokens = Iota(300);
  const SegmentId id = Stored(tokens);
  ASSERT_OK(store_->Recluster(id, RandomOrder(100, 4, row_bytes_)));
  std::filesystem::path path;
  for (const auto& entry : std::filesystem::directory_iterator(options_.dir / "segments")) {
    path = entry.path();
  }
  const uint64_t bytes = std::filesystem::file_size(path);
  for (int i = 0; i < 100; ++i) {
    const uint64_t at = rng() % bytes;
    Open();
    FlipByte(path, at);
    const auto prefix = store_->OpenPrefix(id, 0);
    if (prefix.ok()) {
      const auto compared = Compare(**prefix, tokens);
      if (compared.ok()) {
        EXPECT_EQ(*compared, "");  // the flip hit bytes that reading does not need
      }
    }
    FlipByte(path, at);
    ASSERT_OK(store_->Verify(&id, nullptr));
  }
  ExpectWhole(id, tokens);
}

TEST_F(RewriteTest, BlobsComeWithTheMergedSegment) {
  const auto one = Iota(40), two = Join(one, Iota(30, 1000));
  const SegmentId a = Stored(one), b = Stored(two);
  ASSERT_OK(store_->PutBlob(a, "old", "p", std::vector<std::byte>(100)));
  const std::vector<std::byte> bytes(5000, std::byte{7});
  const std::vector<NewBlob> blobs = {{"x", "made", bytes}, {"y", "made", {}}};
  const std::vector<NewBlob> bad = {blobs[0], {"no/name", "made", {}}};
  EXPECT_CODE(store_->Compact(b, 69, blobs), Code::kFailedPrecondition);
  EXPECT_CODE(store_->Compact(b, 1000, bad), Code::kInvalidArgument);
  EXPECT_EQ(FilesIn(options_.dir / "segments"), 3u);  // nothing was left behind
  const auto preview = store_->CheckCompaction(b, 1000);
  ASSERT_OK(preview);
  EXPECT_CODE(store_->CheckCompaction(b, 69), Code::kFailedPrecondition);
  EXPECT_EQ(preview->n_tokens, 70u);
  EXPECT_EQ(preview->own_tokens, 70u);
  EXPECT_EQ(preview->chain, std::vector<SegmentId>{preview->id});
  EXPECT_CODE(store_->GetPrefix(preview->id), Code::kNotFound);
  const auto compacted = store_->Compact(b, 1000, blobs);
  ASSERT_OK(compacted);
  for (const bool reopened : {false, true}) {
    if (reopened) Open();
    EXPECT_EQ(store_->ListBlobs(*compacted), (std::vector<std::string>{"x", "y"}));
    const auto x = store_->GetBlob(*compacted, "x", "made");
    ASSERT_OK(x);
    EXPECT_EQ(*x, bytes);
    EXPECT_EQ(FilesIn(options_.dir / "segments"), 3u);
    EXPECT_EQ(store_->stats().recovered_orphans, 0u);
  }
}

TEST_F(RewriteTest, AMergeWhoseBlobsHaveNoRoomLeavesNothing) {
  const auto one = Iota(40), two = Join(one, Iota(30, 1000));
  Stored(one);
  const SegmentId b = Stored(two);
  const uint64_t bytes = store_->stats().bytes_on_disk;
  options_.quota_bytes = 3 * bytes;  // for both segments and the compacted one
  Open();
  // The second blob exceeds the quota.
  const std::vector<NewBlob> blobs = {{"x", "made", {}}, {"y", "made", {3 * bytes, {}}}};
  EXPECT_CODE(store_->Compact(b, 1000, blobs), Code::kResourceExhausted);
  EXPECT_EQ(FilesIn(options_.dir / "segments"), 2u);
  EXPECT_EQ(store_->stats().bytes_on_disk, bytes);
  ExpectWhole(b, two);
  const auto compacted = store_->Compact(b, 1000, {blobs.data(), 1});
  ASSERT_OK(compacted);
  EXPECT_EQ(store_->ListBlobs(*compacted), std::vector<std::string>{"x"});
}

// A name that stands for a part of a compacted segment stays while that part is open.
TEST_F(RewriteTest, TheNameOfAnOpenPrefixIsNotRemovedAfterACompaction) {
  const auto base = Iota(60), longer = Join(base, Iota(40, 5000));
  const SegmentId a = Stored(base), b = Stored(longer);
  ASSERT_OK(store_->Compact(b, 1000));
  auto whole = store_->OpenPrefix(b, 0);
  ASSERT_OK(whole);
  auto part = store_->OpenPrefix(a, 0);
  ASSERT_OK(part);
  EXPECT_CODE(store_->Remove(a), Code::kFailedPrecondition);
  ExpectWhole(a, base);
  *part = nullptr;
  auto shorter = store_->OpenPrefix(b, 30);  // of tokens that both names have
  ASSERT_OK(shorter);
  EXPECT_CODE(store_->Remove(a), Code::kFailedPrecondition);
  *shorter = nullptr;
  EXPECT_OK(store_->Remove(a));  // the longer one is open, and stays
  EXPECT_EQ(*Compare(**whole, longer), "");
  EXPECT_CODE(store_->Remove(b), Code::kFailedPrecondition);
  *whole = nullptr;
  EXPECT_OK(store_->Remove(b));
}

TEST_F(RewriteTest, CompactedSegmentsKeepTheirNames) {
  const auto one = Iota(40), two = Join(one, Iota(30, 1000)), three = Join(two, Iota(50, 2000));
  const SegmentId a = Stored(one), b = Stored(two), c = Stored(three);
  ASSERT_OK(store_->Recluster(a, RandomOrder(16, 6, row_bytes_)));
  EXPECT_CODE(store_->Compact(b, 1000), Code::kFailedPrecondition);  // continued
  EXPECT_CODE(store_->Compact(a, 1000), Code::kFailedPrecondition);  // no parent
  EXPECT_CODE(store_->Compact(c, 79), Code::kFailedPrecondition);    // too long together
  {
    const auto open = store_->OpenPrefix(c, 0);
    ASSERT_OK(open);
    EXPECT_CODE(store_->Compact(c, 1000), Code::kFailedPrecondition);
  }
  const auto bc = store_->Compact(c, 1000);
  ASSERT_OK(bc);
  EXPECT_EQ(FilesIn(options_.dir / "segments"), 2u);
  const auto abc = store_->Compact(c, 1000);  // by its old name
  ASSERT_OK(abc);
  EXPECT_EQ(FilesIn(options_.dir / "segments"), 1u);
  for (const bool reopened : {false, true}) {
    if (reopened) Open();
    ExpectWhole(a, one);
    ExpectWhole(b, two);
    ExpectWhole(c, three);
    EXPECT_EQ(store_->GetPrefix(b)->n_tokens, 70u);
    EXPECT_EQ(store_->GetPrefix(b)->chain, std::vector<SegmentId>{*abc});
    const auto match = store_->LongestMatch("m", "t", Join(two, Iota(5, 7)));
    ASSERT_OK(match);
    EXPECT_EQ(match->n_tokens, 70u);
    EXPECT_EQ(match->id, *abc);
    EXPECT_EQ(store_->ListPrefixes().size(), 3u);
  }
  // A put of stored tokens returns their name; one that branches off goes below it.
  EXPECT_EQ(Stored(two), b);
  const auto branch = Join(Iota(35), Iota(40, 8000));
  const SegmentId d = Stored(branch);
  ExpectWhole(d, branch);
  ASSERT_OK(store_->Remove(c));
  ASSERT_OK(store_->Remove(a));
  EXPECT_CODE(store_->Remove(a), Code::kNotFound);
  EXPECT_CODE(store_->OpenPrefix(a, 0), Code::kNotFound);
  ExpectWhole(b, two);
  ASSERT_OK(store_->Remove(b));
  ExpectWhole(d, branch);
  ASSERT_OK(store_->Remove(d));
  EXPECT_EQ(FilesIn(options_.dir / "segments"), 0u);
  EXPECT_EQ(store_->stats().bytes_on_disk, 0u);
}

}  // namespace
}  // namespace prefixd::storage
