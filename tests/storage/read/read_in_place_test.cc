// Tests rows read in place: the same rows as copies, whatever happens around them.
#include <algorithm>
#include <numeric>
#include <random>

#include "base/rows/copy_rows.h"
#include "storage/segment/segment_format.h"
#include "tests/storage/open_store.h"

namespace prefixd::storage {
namespace {

class ReadInPlaceTest : public OpenStoreTest {
 protected:
  void SetUp() override {
    options_.host_tier_bytes = 4 << 20;
    Open();
  }

  // Returns "" when `rows` are those of `ids`.
  std::string Differs(const RowsInPlace& rows, std::span<const uint32_t> tokens, uint32_t layer,
                      uint32_t head, std::span<const uint32_t> ids) const {
    const RowShape shape = model_.geometry.row(0);
    const auto states = States(tokens);
    std::vector<std::byte> want(shape.bytes());
    if (rows.rows.size() != ids.size()) return "number of rows";
    for (size_t i = 0; i < ids.size(); ++i) {
      FillRow(states[ids[i]], layer, head, want);
      const RowRef& row = rows.rows[i];
      if (std::memcmp(row.key, want.data(), shape.key_bytes()) != 0 ||
          std::memcmp(row.value, want.data() + shape.key_bytes(), shape.value_bytes()) != 0) {
        return "row of token " + std::to_string(ids[i]);
      }
      for (const std::byte* part : {row.key, row.value}) {
        if (part < rows.region.data() || part >= rows.region.data() + rows.region.size()) {
          return "not in the region";
        }
      }
    }
    return "";
  }
};

TEST_F(ReadInPlaceTest, RowsOfAChainColdAndWarm) {
  std::mt19937_64 rng(Seed("ReadInPlace"));
  auto tokens = RandomTokens(rng, 700, 1000);
  for (const size_t n : {700u, 1200u, 1500u}) {  // a chain of three segments
    const auto more = RandomTokens(rng, n - tokens.size(), 1000);
    tokens.insert(tokens.end(), more.begin(), more.end());
    ASSERT_OK(Put(*store_, model_, tokens));
  }
  Open();
  const auto match = store_->LongestMatch("m", "t", tokens);
  ASSERT_OK(match);
  auto prefix = *store_->OpenPrefix(match->id, 0);
  EXPECT_EQ(prefix->info().chain.size(), 3u);
  for (int round = 0; round < 20; ++round) {
    std::vector<uint32_t> ids;
    for (uint32_t t = static_cast<uint32_t>(rng() % 50); t < tokens.size(); t += 1 + rng() % 40) {
      ids.push_back(t);
    }
    const auto layer = static_cast<uint32_t>(rng() % 2), head = static_cast<uint32_t>(rng() % 2);
    ReadStats cold, warm;
    const auto rows = prefix->ReadInPlace(layer, head, ids, &cold);
    ASSERT_OK(rows);
    EXPECT_EQ(Differs(*rows, tokens, layer, head, ids), "");
    const auto again = prefix->ReadInPlace(layer, head, ids, &warm);
    ASSERT_OK(again);
    EXPECT_EQ(warm.pages_ssd, 0u);
    EXPECT_EQ(warm.pages_host, cold.pages_ssd + cold.pages_host);
    EXPECT_EQ(warm.bytes[static_cast<size_t>(Tier::kHost)],
              ids.size() * model_.geometry.row(0).bytes());
    for (size_t i = 0; i < ids.size(); ++i) EXPECT_EQ(again->rows[i].key, rows->rows[i].key);
    EXPECT_EQ(store_->stats().host_tier_pinned, 2 * warm.pages_host * kPageBytes);
  }
  EXPECT_EQ(store_->stats().host_tier_pinned, 0u);
  const auto none = prefix->ReadInPlace(0, 0, {}, nullptr);
  ASSERT_OK(none);
  EXPECT_TRUE(none->rows.empty());
}

TEST_F(ReadInPlaceTest, OutliveTheirPrefixAndTheStore) {
  const std::vector<uint32_t> tokens(400, 7), ids = {0, 200, 399};
  const auto id = Put(*store_, model_, tokens);
  ASSERT_OK(id);
  auto prefix = *store_->OpenPrefix(*id, 0);
  auto rows = prefix->ReadInPlace(1, 1, ids, nullptr);
  ASSERT_OK(rows);
  prefix.reset();
  ASSERT_OK(store_->Remove(*id));
  const std::vector<uint32_t> others(5000, 9);  // their pages compete for the same place
  const auto other = Put(*store_, model_, others);
  ASSERT_OK(other);
  std::vector<std::byte> out(others.size() * model_.geometry.row(0).bytes());
  auto reader = *store_->OpenPrefix(*other, 0);
  ASSERT_OK(reader->ReadRange(0, 0, {0, 5000}, out, nullptr));
  EXPECT_EQ(Differs(*rows, tokens, 1, 1, ids), "");
  reader.reset();
  store_.reset();
  EXPECT_EQ(Differs(*rows, tokens, 1, 1, ids), "");
}

TEST_F(ReadInPlaceTest, RowsThatCannotBeReadInPlaceAreRefused) {
  const std::vector<uint32_t> tokens(400, 7);
  const auto id = Put(*store_, model_, tokens);
  ASSERT_OK(id);
  {
    const auto prefix = *store_->OpenPrefix(*id, 0);
    const std::vector<uint32_t> beyond = {400}, unsorted = {5, 4}, some = {1};
    EXPECT_CODE(prefix->ReadInPlace(0, 0, beyond, nullptr), Code::kInvalidArgument);
    EXPECT_CODE(prefix->ReadInPlace(0, 0, unsorted, nullptr), Code::kInvalidArgument);
    EXPECT_CODE(prefix->ReadInPlace(2, 0, some, nullptr), Code::kInvalidArgument);
  }
  ModelRecord large = TestModel("large", TestGeometry(1, 1, 1024, DType::kF32));  // rows of 8 KiB
  ASSERT_OK(store_->PutModel(large));
  const std::vector<uint32_t> ids = {3};
  {
    const auto big = Put(*store_, large, tokens);
    ASSERT_OK(big);
    const auto refused = (*store_->OpenPrefix(*big, 0))->ReadInPlace(0, 0, ids, nullptr);
    EXPECT_CODE(refused, Code::kFailedPrecondition);
    EXPECT_NE(refused.error().message.find("use ReadRows"), std::string::npos);
  }
  options_.host_tier_bytes = 0;
  Open();
  EXPECT_CODE((*store_->OpenPrefix(*id, 0))->ReadInPlace(0, 0, ids, nullptr),
              Code::kFailedPrecondition);
  store_.reset();
  options_.host_tier_bytes = 1ull << 62;
  EXPECT_CODE(PrefixStore::Open(options_), Code::kInvalidArgument);
  options_.host_tier_bytes = 1 << 20;
  options_.host_tier_shares = {{"a", 2.0}};
  EXPECT_CODE(PrefixStore::Open(options_), Code::kInvalidArgument);
}

TEST_F(ReadInPlaceTest, ABatchIsPinnedWholeOrNotAtAll) {
  options_.host_tier_bytes = 64 * kPageBytes;
  Open();
  std::vector<uint32_t> tokens(5000), all(5000);
  for (uint32_t i = 0; i < 5000; ++i) tokens[i] = i % 321, all[i] = i;
  const auto id = Put(*store_, model_, tokens);
  ASSERT_OK(id);
  const auto prefix = *store_->OpenPrefix(*id, 0);
  EXPECT_CODE(prefix->ReadInPlace(0, 0, all, nullptr), Code::kResourceExhausted);  // 99 pages
  EXPECT_EQ(store_->stats().host_tier_pinned, 0u);
  const auto half = prefix->ReadInPlace(0, 0, std::span(all).first(51 * 32), nullptr);
  ASSERT_OK(half);
  EXPECT_CODE(prefix->ReadInPlace(0, 0, std::span(all).first(1), nullptr),
              Code::kResourceExhausted);
  EXPECT_EQ(Differs(*half, tokens, 0, 0, std::span(all).first(51 * 32)), "");
  EXPECT_EQ(store_->stats().host_tier_pinned, 32 * kPageBytes);
}

// Runs of several heads: copied from where they lie they are what reading them gives, in both
// layouts, and nothing is found of which a page is missing.
TEST_F(ReadInPlaceTest, RunsOfSeveralHeads) {
  std::mt19937_64 rng(Seed("ReadInPlace.Runs"));
  auto tokens = RandomTokens(rng, 900, 1000);
  ASSERT_OK(Put(*store_, model_, tokens));
  const auto more = RandomTokens(rng, 300, 1000);
  tokens.insert(tokens.end(), more.begin(), more.end());
  const auto id = Put(*store_, model_, tokens);
  ASSERT_OK(id);
  const KvGeometry& g = model_.geometry;
  const RowShape row = g.row(0);
  const size_t key = row.key_bytes(), value = row.value_bytes();
  for (const bool reclustered : {false, true}) {
    if (reclustered) {
      ReclusterOptions options;
      options.chunk_tokens = 128;
      options.order = [&](uint32_t, uint32_t, uint32_t,
                          std::span<const std::byte> rows) -> Result<std::vector<uint32_t>> {
        std::vector<uint32_t> order(rows.size() / row.bytes());
        std::iota(order.begin(), order.end(), 0);
        std::ranges::shuffle(order, rng);
        return order;
      };
      ASSERT_OK(store_->Recluster(*id, options));
    }
    Open();
    auto prefix = *store_->OpenPrefix(*id, 0);
    for (int round = 0; round < 30; ++round) {
      const auto layer = static_cast<uint32_t>(rng() % g.n_layers);
      TokenRange run{static_cast<uint32_t>(rng() % tokens.size()), 0};
      run.end = run.begin + 1 + static_cast<uint32_t>(rng() % (tokens.size() - run.begin));
      const size_t rows = size_t{run.size()} * g.n_kv_heads;
      std::vector<std::byte> k(rows * key), v(rows * value);
      std::vector<WantedRun> wanted;
      for (uint32_t h = 0; h < g.n_kv_heads; ++h) {
        wanted.push_back({h,
                          {std::span(k).subspan(h * key), g.n_kv_heads * key,
                           std::span(v).subspan(h * value), g.n_kv_heads * value}});
      }
      if (round == 0) {
        EXPECT_CODE(prefix->FindInPlace(layer, run, wanted, nullptr), Code::kNotFound);
        EXPECT_EQ(store_->stats().host_tier_pinned, 0u);
      }
      for (const WantedRun& w : wanted) {
        ASSERT_OK(prefix->ReadRange(layer, w.kv_head, run, RowPart::kRow, w.out, nullptr));
      }
      std::vector<std::byte> want_k(k.size()), want_v(v.size());
      want_k.swap(k), want_v.swap(v);
      for (uint32_t h = 0; h < g.n_kv_heads; ++h) {
        wanted[h].out.bytes = std::span(k).subspan(h * key);
        wanted[h].out.values = std::span(v).subspan(h * value);
      }
      ReadStats stats;
      auto found = prefix->FindInPlace(layer, run, wanted, &stats);
      ASSERT_OK(found);
      EXPECT_EQ(stats.pages_ssd, 0u);
      EXPECT_EQ(stats.bytes[static_cast<size_t>(Tier::kHost)], k.size() + v.size());
      EXPECT_EQ(store_->stats().host_tier_pinned, stats.pages_host * kPageBytes);
      for (const RowCopy& copy : found->copies) {
        ASSERT_GE(copy.from, found->region.data());
        ASSERT_LT(copy.from, found->region.data() + found->region.size());
      }
      CopyRows(found->copies, rng() % 2 == 0 ? CopyMode::kStream : CopyMode::kCached);
      ASSERT_EQ(k, want_k) << run.begin << " to " << run.end;
      ASSERT_EQ(v, want_v);
      found->hold.reset();
      EXPECT_EQ(store_->stats().host_tier_pinned, 0u);
    }
    std::vector<std::byte> none;
    const WantedRun beyond = {2, {none, key, none, value}};
    EXPECT_CODE(prefix->FindInPlace(0, {0, 0}, {&beyond, 1}, nullptr), Code::kInvalidArgument);
  }
}

TEST_F(ReadInPlaceTest, DamagedPagesAreNeverLent) {
  std::vector<uint32_t> tokens(5000);
  for (uint32_t i = 0; i < 5000; ++i) tokens[i] = i % 321;
  const auto id = Put(*store_, model_, tokens);
  ASSERT_OK(id);
  const auto prefix = *store_->OpenPrefix(*id, 0);
  FlipByte(SegmentPath(options_.dir, id->bytes), (1 + 60) * kPageBytes + 100);
  const std::vector<uint32_t> with = {51 * 59, 51 * 60}, without = {51 * 59, 51 * 61};
  EXPECT_CODE(prefix->ReadInPlace(0, 0, with, nullptr), Code::kCorrupt);
  EXPECT_EQ(store_->stats().host_tier_pinned, 0u);
  const auto rows = prefix->ReadInPlace(0, 0, without, nullptr);
  ASSERT_OK(rows);
  EXPECT_EQ(Differs(*rows, tokens, 0, 0, without), "");
}

}  // namespace
}  // namespace prefixd::storage
