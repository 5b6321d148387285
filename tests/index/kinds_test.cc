// Tests the contract of every kind of index.
#include <functional>

#include "index/load_index.h"
#include "index/search/recall.h"
#include "tests/index/index_test_support.h"
#include "tests/support/seed.h"

namespace prefixd::index {
namespace {

constexpr uint32_t kKindDim = 24, kFirst = 70, kKindTokens = 3000;

struct Kind {
  IndexKind kind;
  // Recall at its own effort, of 1% of attention-like keys; a lower bound far below the measured
  // value.
  double recall;
};
// The exact index rounds scores to float32 in another order than the test, and two ranks in some
// hundred searches lie so near that it matters.
constexpr Kind kKinds[] = {
    {IndexKind::kExact, 1 - 2.0 / 600}, {IndexKind::kIvf, 0.5}, {IndexKind::kCodes, 0.7}};

Result<std::unique_ptr<KeyIndex>> Build(IndexKind kind, const RowsView& keys) {
  const TokenRange covered{kFirst, kFirst + static_cast<uint32_t>(keys.count)};
  switch (kind) {
    case IndexKind::kExact:
      return MakeExactIndex(covered);
    case IndexKind::kIvf:
      return BuildIvfIndex(keys, covered, {});
    case IndexKind::kCodes:
      return BuildCodesIndex(keys, covered);
  }
  return InvalidArgument("no such kind");
}

class KindsTest : public ::testing::Test {
 protected:
  KindsTest()
      : random_(prefixd::testing::Seed("KindsTest")),
        data_(random_, kKindTokens, kKindDim),
        rows_(data_.keys, kKindDim, DType::kBf16) {}

  SearchRequest Request(const TestRows& rows, std::span<const float> queries, TokenRange candidates,
                        uint32_t k) const {
    return RequestOver(rows, queries, candidates, k, kFirst);
  }

  Random random_;
  AttentionLike data_;
  TestRows rows_;
};

TEST_F(KindsTest, FindWhatTheyShouldAndSayWhatTheyRead) {
  for (const auto& [kind, least] : kKinds) {
    const auto index = Build(kind, rows_.view());
    ASSERT_TRUE(index.ok()) << index.error().ToString();
    EXPECT_EQ((*index)->kind(), kind);
    EXPECT_EQ(*IndexFromName(IndexName(kind)), kind);
    double recall = 0;
    for (int round = 0; round < 20; ++round) {
      const auto queries = data_.Queries(random_, 2);
      const auto request = Request(rows_, queries, {kFirst, kFirst + kKindTokens}, 30);
      const auto selection = (*index)->Search(request);
      ASSERT_TRUE(selection.ok()) << selection.error().ToString();
      ASSERT_EQ(selection->ids.size(), 30u) << IndexName(kind);
      EXPECT_TRUE(std::ranges::is_sorted(selection->ids));
      EXPECT_GT(selection->keys_scanned, 0u);
      EXPECT_GT(selection->bytes_scanned, 30 * kKindDim);
      const auto truth = TrueScores(request, rows_);
      const std::vector<float> scores(truth.begin(), truth.end());
      recall += MeasureSelection(scores, 2, kFirst, selection->ids)->recall / 20;
      for (const Cut& cut : selection->cuts) {
        EXPECT_EQ(cut.kind, kind == IndexKind::kExact ? CutKind::kExact : CutKind::kApproximate)
            << IndexName(kind);
      }
    }
    EXPECT_GE(recall, least - 1e-9) << IndexName(kind);
  }
}

TEST_F(KindsTest, RegionsOfAllSizes) {
  for (const auto& [kind, least] : kKinds) {
    const auto index = Build(kind, rows_.view());
    ASSERT_TRUE(index.ok());
    const auto queries = data_.Queries(random_, 3);
    // k is more than there are, all, or none.
    for (const uint32_t n : {0u, 1u, 50u, kKindTokens}) {
      for (const uint32_t k : {n, n + 1, 100000u}) {
        const TokenRange candidates{kFirst, kFirst + n};
        const auto all = (*index)->Search(Request(rows_, queries, candidates, k));
        ASSERT_TRUE(all.ok()) << IndexName(kind) << ' ' << all.error().ToString();
        ASSERT_EQ(all->ids.size(), n);
        EXPECT_TRUE(n == 0 || (all->ids.front() == kFirst && all->ids.back() == kFirst + n - 1));
        for (const Cut& cut : all->cuts) EXPECT_EQ(cut.kind, CutKind::kExact);
      }
    }
    const auto none = (*index)->Search(Request(rows_, queries, {kFirst, kFirst + kKindTokens}, 0));
    ASSERT_TRUE(none.ok()) << none.error().ToString();
    EXPECT_TRUE(none->ids.empty());
    // The candidates are a part of the tokens, which begins and ends anywhere.
    for (int round = 0; round < 10; ++round) {
      const uint32_t begin = kFirst + Uniform(random_, 0, kKindTokens - 1);
      const TokenRange part{begin, Uniform(random_, begin, kFirst + kKindTokens)};
      const uint32_t k = Uniform(random_, 0, 60);
      const auto some = (*index)->Search(Request(rows_, queries, part, k));
      ASSERT_TRUE(some.ok()) << IndexName(kind) << ' ' << some.error().ToString();
      ASSERT_EQ(some->ids.size(), std::min(k, part.size()));
      for (const uint32_t id : some->ids) EXPECT_TRUE(part.contains(id));
    }
  }
}

TEST_F(KindsTest, EqualKeys) {
  const TestRows same(std::vector<float>(size_t{2000} * kKindDim, 0.75f), kKindDim, DType::kF32);
  for (const auto& [kind, least] : kKinds) {
    const auto index = Build(kind, same.view());
    ASSERT_TRUE(index.ok()) << IndexName(kind) << ' ' << index.error().ToString();
    const auto queries = data_.Queries(random_, 2);
    const auto found = (*index)->Search(Request(same, queries, {kFirst, kFirst + 2000}, 20));
    ASSERT_TRUE(found.ok()) << IndexName(kind) << ' ' << found.error().ToString();
    EXPECT_EQ(found->ids.size(), 20u) << IndexName(kind);
    EXPECT_EQ(std::ranges::adjacent_find(found->ids), found->ids.end());
    for (uint32_t g = 0; g < 2; ++g) {
      double score = 0;
      for (uint32_t d = 0; d < kKindDim; ++d) score += 0.75 * queries[g * kKindDim + d];
      EXPECT_NEAR(found->cuts[g].score, Layer(kKindDim).scale * score, 5e-3) << IndexName(kind);
    }
  }
}

TEST_F(KindsTest, KeysThatAreNotNumbersAreRefused) {
  for (const auto& [kind, least] : kKinds) {
    if (kind == IndexKind::kExact) continue;  // it sees keys when it searches
    for (const float bad : {std::nanf(""), std::numeric_limits<float>::infinity()}) {
      std::vector<float> keys = data_.keys;
      keys[size_t{1234} * kKindDim + 5] = bad;
      const TestRows rows(keys, kKindDim, DType::kF32);
      const auto index = Build(kind, rows.view());
      ASSERT_FALSE(index.ok()) << IndexName(kind);
      EXPECT_EQ(index.error().code, Code::kInvalidArgument);
      const std::string& message = index.error().message;  // it names the token, or its row
      EXPECT_TRUE(message.find(std::to_string(kFirst + 1234)) != std::string::npos ||
                  message.find("row 1234") != std::string::npos)
          << message;
    }
  }
}

TEST_F(KindsTest, StoredOnesSelectTheSameAndDamagedOnesAreCorrupt) {
  for (const auto& [kind, least] : kKinds) {
    const auto index = Build(kind, rows_.view());
    ASSERT_TRUE(index.ok());
    auto bytes = (*index)->Serialize();
    ASSERT_TRUE(bytes.ok());
    if (kind == IndexKind::kExact) {
      EXPECT_TRUE(bytes->empty());
      continue;
    }
    const auto loaded = LoadIndex(*bytes);
    ASSERT_TRUE(loaded.ok()) << loaded.error().ToString();
    EXPECT_EQ((*loaded)->kind(), kind);
    EXPECT_EQ((*loaded)->covered(), (*index)->covered());
    for (int round = 0; round < 10; ++round) {
      const auto queries = data_.Queries(random_, 2);
      const auto request = Request(rows_, queries, {kFirst, kFirst + kKindTokens}, 25);
      EXPECT_EQ((*index)->Search(request)->ids, (*loaded)->Search(request)->ids);
    }
    const auto corrupt = [&](std::span<const std::byte> damaged) {
      const auto refused = LoadIndex(damaged);
      return !refused.ok() && refused.error().code == Code::kCorrupt;
    };
    for (int round = 0; round < 200; ++round) {
      const size_t at = random_() % bytes->size();
      const std::byte flip{static_cast<uint8_t>(Uniform(random_, 1, 255))};
      (*bytes)[at] ^= flip;
      EXPECT_TRUE(corrupt(*bytes)) << IndexName(kind) << " byte " << at;
      (*bytes)[at] ^= flip;
      EXPECT_TRUE(corrupt(std::span(*bytes).first(random_() % bytes->size())));
    }
  }
}

// A search with a reader gives the same set as keys in memory.
TEST_F(KindsTest, KeysMayComeFromAReader) {
  CountingReader reader(rows_, kFirst);
  for (const auto& [kind, least] : kKinds) {
    // The last 100 tokens are appended.
    const auto index = Build(kind, rows_.view().Sub(0, kKindTokens - 100));
    ASSERT_TRUE(index.ok() || kind == IndexKind::kExact);
    for (int round = 0; round < 5; ++round) {
      const auto queries = data_.Queries(random_, 2);
      SearchRequest request = Request(rows_, queries, {kFirst, kFirst + kKindTokens}, 25);
      const auto from_memory = (*index)->Search(request);
      request.reader = &reader;
      request.keys = {};
      request.keys.shape = rows_.shape;
      const auto read = (*index)->Search(request);
      ASSERT_TRUE(from_memory.ok() && read.ok());
      EXPECT_EQ(from_memory->ids, read->ids) << IndexName(kind);
    }
  }
}

}  // namespace
}  // namespace prefixd::index
