#include "index/search/tuning.h"

#include "index/search/recall.h"
#include "tests/index/index_test_support.h"
#include "tests/support/seed.h"

namespace prefixd::index {
namespace {

class TuningTest : public ::testing::Test {
 protected:
  static constexpr uint32_t kDim = 32, kFirst = 50, kTokens = 4000, kGroup = 2;

  TuningTest()
      : random_(prefixd::testing::Seed("TuningTest")),
        data_(random_, kTokens, kDim),
        rows_(data_.keys, kDim, DType::kBf16),
        tune_(Queries(16)),
        held_out_(Queries(16)) {}

  CausalQueries Queries(uint32_t n) {
    CausalQueries queries{data_.Queries(random_, n * kGroup), {}};
    for (uint32_t i = 0; i < n; ++i) {
      queries.positions.push_back(kFirst + kTokens * 3 / 4 + i * kTokens / (4 * n));
    }
    return queries;
  }
  std::vector<std::unique_ptr<KeyIndex>> Built() const {
    std::vector<std::unique_ptr<KeyIndex>> built;
    const TokenRange covered{kFirst, kFirst + kTokens};
    built.push_back(BuildCodesIndex(rows_.view(), covered).value());
    built.push_back(BuildIvfIndex(rows_.view(), covered, {}).value());
    return built;
  }
  TuningInput Input(const CausalQueries& tune, const CausalQueries& held_out, double target) const {
    return {tune, held_out, kGroup, Layer(kDim), rows_.view(), 0.01, target};
  }

  Random random_;
  AttentionLike data_;
  TestRows rows_;
  CausalQueries tune_, held_out_;
};

TEST_F(TuningTest, MoreIsLookedAtForAHigherTarget) {
  for (const auto& index : Built()) {
    float before = 0;
    for (const double target : {0.1, 0.8, 0.95}) {
      const auto found = Tune(*index, Input(tune_, held_out_, target));
      ASSERT_TRUE(found.ok()) << found.error().ToString();
      EXPECT_EQ(found->queries, 16u);
      EXPECT_EQ(found->k, 40u);  // 1% of the keys that the last query saw, rounded up
      EXPECT_GE(index->effort(), before);
      before = index->effort();
    }
    const auto efforts = index->efforts();
    EXPECT_TRUE(std::is_sorted(efforts.begin(), efforts.end()));
    // No effort reaches the target, so the most is chosen.
    ASSERT_TRUE(Tune(*index, Input(tune_, held_out_, 2)).ok());
    EXPECT_EQ(index->effort(), efforts.back());
    ASSERT_TRUE(Tune(*index, Input(tune_, held_out_, -1)).ok());
    EXPECT_EQ(index->effort(), efforts.front());
  }
}

// The reported recall is that of a search against the float64 truth, among the keys that a query
// saw.
TEST_F(TuningTest, ReportsWhatTheOtherHalfFinds) {
  for (const auto& index : Built()) {
    const auto found = Tune(*index, Input(tune_, held_out_, 0.6));
    ASSERT_TRUE(found.ok());
    double recall = 0;
    for (size_t i = 0; i < 16; ++i) {
      SearchRequest request;
      request.queries = std::span(held_out_.q).subspan(i * kGroup * kDim, kGroup * kDim);
      request.group = kGroup;
      request.layer = Layer(kDim);
      request.candidates = {kFirst, held_out_.positions[i]};
      request.k = (request.candidates.size() + 99) / 100;
      request.keys = rows_.view();
      request.first_token = kFirst;
      const auto selection = index->Search(request);
      ASSERT_TRUE(selection.ok());
      const auto truth = TrueScores(request, rows_);
      const std::vector<float> scores(truth.begin(), truth.end());
      recall += MeasureSelection(scores, kGroup, kFirst, selection->ids)->recall / 16;
    }
    EXPECT_NEAR(found->recall, recall, 0.01);
    EXPECT_LE(found->mass, 1 + 1e-6);
    EXPECT_GE(found->mass, found->recall - 0.2);
  }
}

TEST_F(TuningTest, WithoutQueriesNothingIsMeasuredAndNothingChanges) {
  CausalQueries none, early = Queries(4);
  for (uint32_t& position : early.positions) position = kFirst + kMinCodeKeys - 1;
  for (const auto& index : Built()) {
    const float effort = index->effort();
    for (const CausalQueries* queries : {&none, &early}) {
      const auto found = Tune(*index, Input(*queries, *queries, 0.99));
      ASSERT_TRUE(found.ok());
      EXPECT_EQ(found->queries, 0u);
      EXPECT_EQ(index->effort(), effort);
    }
    // One half alone tunes and measures.
    EXPECT_EQ(Tune(*index, Input(tune_, none, 0.5))->queries, 16u);
    EXPECT_FALSE(index->SetEffort(0).ok());
    EXPECT_FALSE(index->SetEffort(std::numeric_limits<float>::quiet_NaN()).ok());
  }
}

}  // namespace
}  // namespace prefixd::index
