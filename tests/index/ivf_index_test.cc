#include <numeric>

#include "index/search/recall.h"
#include "tests/index/index_test_support.h"
#include "tests/support/seed.h"

namespace prefixd::index {
namespace {

std::unique_ptr<KeyIndex> Build(const RowsView& keys, TokenRange covered, float probe_fraction,
                                uint32_t n_lists = 0) {
  IvfOptions options;
  options.probe_fraction = probe_fraction;
  options.n_lists = n_lists;
  auto index = BuildIvfIndex(keys, covered, options);
  EXPECT_TRUE(index.ok()) << (index.ok() ? "" : index.error().ToString());
  return index.ok() ? std::move(index).value() : nullptr;
}

TEST(IvfIndex, ProbingEveryListIsExact) {
  Random random(prefixd::testing::Seed("ProbingEveryListIsExact"));
  for (int round = 0; round < 24; ++round) {
    const uint32_t n = Uniform(random, kMinIvfKeys, 2500), dim = Uniform(random, 2, 80);
    const uint32_t group = Uniform(random, 1, 8), first = Uniform(random, 0, 99);
    const AttentionLike data(random, n, dim);
    const TestRows rows(data.keys, dim, AnyDType(random), Uniform(random, 0, 9),
                        Uniform(random, 0, 5));
    const auto index = Build(rows.view(), {first, first + n}, 1.0f);
    ASSERT_TRUE(index != nullptr);
    const std::vector<float> queries = data.Queries(random, group);
    SearchRequest request =
        RequestOver(rows, queries, {first, first + n}, Uniform(random, 0, n - 1), first);
    if (round % 4 == 0) request.layer.softcap = 6;
    SCOPED_TRACE("round " + std::to_string(round) + ": n " + std::to_string(n) + ", dim " +
                 std::to_string(dim) + ", group " + std::to_string(group) + ", k " +
                 std::to_string(request.k));
    const auto selection = index->Search(request);
    ASSERT_TRUE(selection.ok()) << selection.error().ToString();
    // L_g is a sum over 16-bit codes; with one head it does not change the ranking.
    const double slack = FloatSlack(request, rows);
    ExpectExactSelection(*selection, request, rows, slack + 5e-3);
    if (group == 1) {
      const Truth truth = TrueRanks(request, rows);
      std::vector<double> sorted = truth.rank;
      std::sort(sorted.begin(), sorted.end(), std::greater<>());
      for (const uint32_t id : selection->ids) {
        EXPECT_GE(truth.rank[id - first], sorted[request.k] - slack) << "token " << id;
      }
    }
    for (const Cut& cut : selection->cuts) EXPECT_EQ(cut.kind, CutKind::kApproximate);
    EXPECT_EQ(selection->keys_scanned, n);
  }
}

TEST(IvfIndex, RerankingMakesOneHeadExactDespiteCoarseCodes) {
  Random random(prefixd::testing::Seed("RerankingMakesOneHeadExactDespiteCoarseCodes"));
  // One channel holds +-1500 after centring, where 16-bit codes are 1 apart: scored from codes
  // alone, tokens come out of order by ten times the slack that is allowed here.
  const uint32_t n = 1200, dim = 8;
  std::vector<float> keys = Normal(random, size_t{n} * dim, 0.01f);
  for (uint32_t i = 0; i < n; ++i) keys[i * dim] = 3000.0f * static_cast<float>(i % 2);
  for (uint32_t i = 0; i < n; ++i) keys[i * dim] += Normal(random, 1)[0];
  const TestRows rows(keys, dim, DType::kF32);
  const auto index = Build(rows.view(), {0, n}, 1.0f);
  ASSERT_TRUE(index != nullptr);
  for (int round = 0; round < 20; ++round) {
    std::vector<float> queries = Normal(random, dim);
    queries[0] = 0.02f;
    const SearchRequest request = RequestOver(rows, queries, {0, n}, 40, 0);
    const auto selection = index->Search(request);
    ASSERT_TRUE(selection.ok());
    // The short list is short: codes and their ids, centroids, and less than half of the keys.
    const uint64_t n_lists = 138;
    EXPECT_LT(selection->bytes_scanned,
              n * (2 * dim + 8) + n_lists * dim * 4 + n / 2 * rows.shape.key_bytes());
    const Truth truth = TrueRanks(request, rows);
    std::vector<double> sorted = truth.rank;
    std::sort(sorted.begin(), sorted.end(), std::greater<>());
    for (const uint32_t id : selection->ids) {
      EXPECT_GE(truth.rank[id], sorted[39] - FloatSlack(request, rows));
    }
  }
}

TEST(IvfIndex, RecallOnClusteredKeysWithShiftedQueries) {
  Random random(prefixd::testing::Seed("RecallOnClusteredKeysWithShiftedQueries"));
  const uint32_t n = 6000, dim = 48, group = 4, k = 60;
  const AttentionLike data(random, n, dim);
  const TestRows rows(data.keys, dim, DType::kBf16);
  const auto few = Build(rows.view(), {0, n}, 0.05f);
  const auto usual = Build(rows.view(), {0, n}, 0.3f);
  ASSERT_TRUE(few != nullptr && usual != nullptr);
  double recall = 0, mass = 0;
  uint64_t scanned = 0, scanned_few = 0;
  const int rounds = 30;
  for (int round = 0; round < rounds; ++round) {
    const std::vector<float> queries = data.Queries(random, group);
    const SearchRequest request = RequestOver(rows, queries, {0, n}, k, 0);
    const auto selection = usual->Search(request), cheap = few->Search(request);
    ASSERT_TRUE(selection.ok() && cheap.ok());
    ExpectWellFormed(*selection, request);
    const std::vector<double> truth = TrueScores(request, rows);
    const std::vector<float> scores(truth.begin(), truth.end());
    const auto quality = MeasureSelection(scores, group, 0, selection->ids);
    ASSERT_TRUE(quality.ok());
    recall += quality->recall / rounds;
    mass += quality->worst_relative_mass() / rounds;
    scanned += selection->keys_scanned;
    scanned_few += cheap->keys_scanned;
    EXPECT_GE(selection->bytes_scanned, selection->keys_scanned * (2 * dim + 8));
  }
  std::printf("recall@%u %.3f, worst head's mass %.3f, scanned %.3f (5%% of lists: %.3f)\n", k,
              recall, mass, double(scanned) / (double(n) * rounds),
              double(scanned_few) / (double(n) * rounds));
  EXPECT_GE(recall, 0.9);
  EXPECT_GE(mass, 0.9);
  EXPECT_LT(scanned, uint64_t{n} * rounds * 9 / 10);
  EXPECT_LT(scanned_few, scanned);
}

TEST(IvfIndex, CandidatesAreHonouredInsideAndOutsideOfWhatIsCovered) {
  Random random(prefixd::testing::Seed("CandidatesAreHonouredInsideAndOutside"));
  const uint32_t n = 1500, dim = 16, group = 3;
  const AttentionLike data(random, n, dim);
  const TestRows rows(data.keys, dim, DType::kF32);
  const uint32_t first = 50;
  // The index covers rows 200 to 1200; a request may name any token.
  const TokenRange covered{first + 200, first + 1200};
  for (const float fraction : {0.02f, 0.9f, 1.0f}) {
    const auto index = Build(rows.view().Sub(200, 1000), covered, fraction);
    ASSERT_TRUE(index != nullptr);
    EXPECT_EQ(index->covered(), covered);
    for (int round = 0; round < 40; ++round) {
      const uint32_t begin = round == 0 ? 0 : Uniform(random, 0, n);
      const uint32_t end = round == 0 ? n : Uniform(random, begin, n);
      const std::vector<float> queries = data.Queries(random, group);
      const SearchRequest request = RequestOver(rows, queries, {first + begin, first + end},
                                                Uniform(random, 0, (end - begin) / 2 + 1), first);
      SCOPED_TRACE("fraction " + std::to_string(fraction) + ", rows " + std::to_string(begin) +
                   " to " + std::to_string(end) + ", k " + std::to_string(request.k));
      const auto selection = index->Search(request);
      ASSERT_TRUE(selection.ok()) << selection.error().ToString();
      ExpectWellFormed(*selection, request);
      EXPECT_LE(selection->keys_scanned, end - begin);
      if (fraction == 1.0f) {
        ExpectExactSelection(*selection, request, rows, FloatSlack(request, rows) + 5e-3);
      }
    }
  }
}

TEST(IvfIndex, AppendedTokensAreFoundExactly) {
  Random random(prefixd::testing::Seed("AppendedTokensAreFoundExactly"));
  const uint32_t n = 1000, appended = 64, dim = 24;
  const AttentionLike data(random, n + appended, dim);
  std::vector<float> keys = data.keys;
  const std::vector<float> queries = data.Queries(random, 1);
  // Every fourth appended token matches the query.
  std::vector<uint32_t> planted;
  for (uint32_t i = n; i < n + appended; i += 4) {
    planted.push_back(i);
    for (uint32_t d = 0; d < dim; ++d) keys[i * dim + d] = 20 * queries[d];
  }
  const TestRows rows(keys, dim, DType::kBf16);
  const auto index = Build(rows.view().Sub(0, n), {0, n}, 0.05f);
  ASSERT_TRUE(index != nullptr);
  const auto selection = index->Search(
      RequestOver(rows, queries, {0, n + appended}, static_cast<uint32_t>(planted.size()), 0));
  ASSERT_TRUE(selection.ok());
  EXPECT_EQ(selection->ids, planted);
}

TEST(IvfIndex, ProbesOnUntilThereAreEnoughTokens) {
  Random random(prefixd::testing::Seed("ProbesOnUntilThereAreEnoughTokens"));
  const uint32_t n = 1000, dim = 16;
  const AttentionLike data(random, n, dim);
  const TestRows rows(data.keys, dim, DType::kF16);
  const auto index = Build(rows.view(), {0, n}, 0.001f);
  ASSERT_TRUE(index != nullptr);
  const std::vector<float> queries = data.Queries(random, 2);
  for (const uint32_t k : {1u, 100u, 500u, 998u, 999u}) {
    const auto selection = index->Search(RequestOver(rows, queries, {0, n}, k, 0));
    ASSERT_TRUE(selection.ok());
    EXPECT_EQ(selection->ids.size(), size_t{k});
    EXPECT_GT(selection->keys_scanned, k);
    for (const Cut& cut : selection->cuts) EXPECT_TRUE(std::isfinite(cut.score));
  }
  for (const uint32_t k : {1000u, 5000u}) {
    const auto all = index->Search(RequestOver(rows, queries, {0, n}, k, 0));
    ASSERT_TRUE(all.ok());
    EXPECT_EQ(all->ids.size(), size_t{n});
    EXPECT_EQ(all->cuts[1].kind, CutKind::kExact);
    EXPECT_EQ(all->cuts[1].score, -std::numeric_limits<float>::infinity());
  }
}

TEST(IvfIndex, EqualKeysAreSearchable) {
  const uint32_t n = 700, dim = 8;
  const TestRows rows(std::vector<float>(size_t{n} * dim, 2.5f), dim, DType::kBf16);
  const std::vector<float> queries(2 * dim, 0.25f);
  for (const float fraction : {0.1f, 1.0f}) {
    const auto index = Build(rows.view(), {0, n}, fraction);
    ASSERT_TRUE(index != nullptr);
    const SearchRequest request = RequestOver(rows, queries, {0, n}, 30, 0);
    const auto selection = index->Search(request);
    ASSERT_TRUE(selection.ok()) << selection.error().ToString();
    ExpectWellFormed(*selection, request);
    const double score = request.layer.scale * dim * 2.5 * 0.25;
    for (const Cut& cut : selection->cuts) EXPECT_NEAR(cut.score, score, 1e-4);
    const auto none = index->Search(RequestOver(rows, queries, {7, 7}, 30, 0));
    ASSERT_TRUE(none.ok());
    EXPECT_TRUE(none->ids.empty());
  }
}

TEST(IvfIndex, SameSeedAndKeysGiveTheSameIndex) {
  Random random(prefixd::testing::Seed("SameSeedAndKeysGiveTheSameIndex"));
  const AttentionLike data(random, 900, 16);
  const TestRows rows(data.keys, 16, DType::kBf16);
  const auto a = Build(rows.view(), {0, 900}, 0.3f), b = Build(rows.view(), {0, 900}, 0.3f);
  ASSERT_TRUE(a != nullptr && b != nullptr);
  const auto bytes_a = a->Serialize(), bytes_b = b->Serialize();
  ASSERT_TRUE(bytes_a.ok() && bytes_b.ok());
  EXPECT_TRUE(*bytes_a == *bytes_b);
}

void ExpectBuildRefused(const RowsView& keys, TokenRange covered, const IvfOptions& options,
                        const std::string& what) {
  const auto index = BuildIvfIndex(keys, covered, options);
  ASSERT_FALSE(index.ok()) << what;
  EXPECT_EQ(index.error().code, Code::kInvalidArgument);
  EXPECT_NE(index.error().message.find(what), std::string::npos) << index.error().message;
}

TEST(IvfIndex, WhatCannotBeIndexedIsRefused) {
  Random random(prefixd::testing::Seed("WhatCannotBeIndexedIsRefused"));
  const uint32_t n = 400, dim = 4, first = 1000;
  std::vector<float> keys = Normal(random, size_t{n} * dim);
  const TestRows good(keys, dim, DType::kF32);
  ExpectBuildRefused(good.view().Sub(0, 255), {first, first + 255}, {}, "use an exact index");
  ExpectBuildRefused(good.view(), {first, first + n + 1}, {}, "was given");
  ExpectBuildRefused(good.view(), {first + n, first}, {}, "was given");
  for (const float fraction : {0.0f, -1.0f, 1.5f, std::numeric_limits<float>::quiet_NaN()}) {
    IvfOptions options;
    options.probe_fraction = fraction;
    ExpectBuildRefused(good.view(), {first, first + n}, options, "probe_fraction");
  }
  IvfOptions many;
  many.n_lists = 201;
  ExpectBuildRefused(good.view(), {first, first + n}, many, "lists");
  many.n_lists = 4000000000u;
  ExpectBuildRefused(good.view(), {first, first + n}, many, "lists");
  for (const float bad :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(), 2e5f}) {
    keys[321 * dim + 1] = bad;
    const TestRows rows(keys, dim, DType::kF32);
    ExpectBuildRefused(rows.view(), {first, first + n}, {}, "token 1321");
  }
}

TEST(IvfIndex, BadQueriesAreRefusedAndNamed) {
  Random random(prefixd::testing::Seed("BadQueriesAreRefusedAndNamed"));
  const AttentionLike data(random, 400, 8);
  const TestRows rows(data.keys, 8, DType::kBf16);
  const auto index = Build(rows.view(), {0, 400}, 0.3f);
  ASSERT_TRUE(index != nullptr);
  std::vector<float> queries = data.Queries(random, 4);
  queries[2 * 8 + 5] = std::numeric_limits<float>::quiet_NaN();
  const auto nan = index->Search(RequestOver(rows, queries, {0, 400}, 5, 0));
  ASSERT_FALSE(nan.ok());
  EXPECT_EQ(nan.error().code, Code::kInvalidArgument);
  EXPECT_NE(nan.error().message.find("query head 2"), std::string::npos) << nan.error().message;

  const TestRows wider(Normal(random, 400 * 9), 9, DType::kBf16);
  const auto other = index->Search(RequestOver(wider, Normal(random, 9), {0, 400}, 5, 0));
  ASSERT_FALSE(other.ok());
  EXPECT_EQ(other.error().code, Code::kInvalidArgument);
}

}  // namespace
}  // namespace prefixd::index
