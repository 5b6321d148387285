#include "index/load_index.h"
#include "index/search/envelope.h"
#include "index/search/recall.h"
#include "tests/index/index_test_support.h"
#include "tests/support/expect_ok.h"
#include "tests/support/seed.h"

namespace prefixd::index {
namespace {

class CodesIndexTest : public ::testing::Test {
 protected:
  static constexpr uint32_t kDim = 64, kFirst = 100, kTokens = 6000, kAppended = 200;

  CodesIndexTest()
      : random_(prefixd::testing::Seed("CodesIndexTest")),
        data_(random_, kTokens + kAppended, kDim),
        rows_(data_.keys, kDim, DType::kBf16) {
    auto built = BuildCodesIndex(rows_.view().Sub(0, kTokens), {kFirst, kFirst + kTokens});
    EXPECT_TRUE(built.ok());
    if (built.ok()) index_ = std::move(built).value();
  }
  SearchRequest Request(std::span<const float> queries, TokenRange candidates, uint32_t k) const {
    return RequestOver(rows_, queries, candidates, k, kFirst);
  }
  double Recall(const SearchRequest& request, const Selection& selection) const {
    const std::vector<double> truth = TrueScores(request, rows_);
    const std::vector<float> scores(truth.begin(), truth.end());
    const auto quality =
        MeasureSelection(scores, request.group, request.candidates.begin, selection.ids);
    EXPECT_TRUE(quality.ok());
    return quality.ok() ? quality->recall : 0;
  }

  Random random_;
  AttentionLike data_;
  TestRows rows_;
  std::unique_ptr<KeyIndex> index_;
};

TEST_F(CodesIndexTest, FindsAlmostAllReadingAFewPerCentOfTheKeys) {
  double recall = 0;
  const int rounds = 40;
  for (int round = 0; round < rounds; ++round) {
    const auto queries = data_.Queries(random_, Uniform(random_, 1, 8));
    const SearchRequest request = Request(queries, {kFirst, kFirst + kTokens}, kTokens / 100);
    const auto selection = index_->Search(request);
    ASSERT_TRUE(selection.ok()) << selection.error().ToString();
    ExpectWellFormed(*selection, request);
    recall += Recall(request, *selection) / rounds;
    for (const Cut& cut : selection->cuts) EXPECT_EQ(cut.kind, CutKind::kApproximate);
    EXPECT_EQ(selection->keys_scanned, size_t{kTokens});
    const double fraction = double(selection->bytes_scanned) / (kTokens * 2.0 * kDim);
    EXPECT_LT(fraction, 0.125 + 0.08 + 0.03);  // codes, re-ranked keys, code book and means
  }
  EXPECT_GT(recall, 0.84);  // keys fill their space almost evenly: the hardest case
}

TEST_F(CodesIndexTest, CutsAreNearTheTruth) {
  for (int round = 0; round < 20; ++round) {
    const auto queries = data_.Queries(random_, 2);
    const SearchRequest request = Request(queries, {kFirst, kFirst + kTokens}, 120);
    const auto selection = index_->Search(request);
    ASSERT_TRUE(selection.ok());
    const Truth truth = TrueRanks(request, rows_);
    std::vector<double> ranks = truth.rank;
    std::nth_element(ranks.begin(), ranks.begin() + 120, ranks.end(), std::greater<>());
    for (uint32_t g = 0; g < 2; ++g) {
      EXPECT_NEAR(selection->cuts[g].score, truth.lse[g] + ranks[120], 0.5);
    }
  }
}

// What an induction head does: all weight on one key, by what sets it apart from those around it.
// The mean of its block does not show it, only its own code does.
TEST(CodesOfOutliers, AKeyUnlikeItsBlockIsFoundAtTheLeastEffort) {
  constexpr uint32_t kWide = 64, kKeys = 4096, kTopics = 40;
  Random random(prefixd::testing::Seed("AKeyUnlikeItsBlockIsFound"));
  const std::vector<float> topics = Normal(random, size_t{kTopics} * kWide, 1.5f);
  const std::vector<float> apart = Normal(random, size_t{kKeys} * kWide);
  std::vector<float> keys = apart;
  std::vector<uint32_t> topic(kKeys);
  for (uint32_t t = 0; t < kKeys; ++t) {
    topic[t] = Uniform(random, 0, kTopics - 1);
    for (uint32_t d = 0; d < kWide; ++d) keys[t * kWide + d] += topics[topic[t] * kWide + d];
  }
  const TestRows rows(keys, kWide, DType::kBf16);
  auto index = BuildCodesIndex(rows.view(), {0, kKeys});
  ASSERT_TRUE(index.ok()) << index.error().ToString();
  ASSERT_TRUE((*index)->SetEffort((*index)->efforts().front()).ok());
  int asked = 0, missed = 0;
  for (int round = 0; round < 400; ++round) {
    const uint32_t wanted = Uniform(random, 0, kKeys - 1);
    std::vector<float> query(kWide);
    for (uint32_t d = 0; d < kWide; ++d) {
      query[d] = 3 * apart[wanted * kWide + d] - 0.5f * topics[topic[wanted] * kWide + d];
    }
    const SearchRequest request = RequestOver(rows, query, {0, kKeys}, kKeys / 100);
    const Truth truth = TrueRanks(request, rows);
    const double weight = std::exp(truth.scores[wanted] - truth.lse[0]);
    if (weight < 0.1) continue;
    ++asked;
    const auto found = (*index)->Search(request);
    ASSERT_TRUE(found.ok()) << found.error().ToString();
    missed += std::ranges::find(found->ids, wanted) == found->ids.end() ? 1 : 0;
  }
  EXPECT_GT(asked, 30);
  // Codes are approximate: one of thousands is missed. Where blocks were chosen by their means,
  // more than half of them were.
  EXPECT_LE(missed, 2) << "of " << asked;
}

TEST_F(CodesIndexTest, MoreEffortFindsNoLess) {
  double before = 0;
  for (const float effort : {1.0f, 1.6f, 4.0f}) {
    ASSERT_TRUE(index_->SetEffort(effort).ok());
    Random same(7);
    double recall = 0, cut = 0;
    const int rounds = 30;
    for (int round = 0; round < rounds; ++round) {
      const auto queries = data_.Queries(same, 2);
      // These candidates cut windows of keys at both ends.
      const SearchRequest request = Request(
          queries, {kFirst + Uniform(same, 0, 900), kFirst + kTokens - Uniform(same, 0, 900)},
          kTokens / 100);
      const auto selection = index_->Search(request);
      ASSERT_TRUE(selection.ok()) << selection.error().ToString();
      ExpectWellFormed(*selection, request);
      recall += Recall(request, *selection) / rounds;
      EXPECT_EQ(selection->keys_scanned, request.candidates.size());
      const Truth truth = TrueRanks(request, rows_);
      std::vector<double> ranks = truth.rank;
      std::nth_element(ranks.begin(), ranks.begin() + request.k, ranks.end(), std::greater<>());
      cut += (selection->cuts[0].score - truth.lse[0] - ranks[request.k]) / rounds;
    }
    EXPECT_GT(recall, before - 0.01);
    EXPECT_GT(recall, 0.88);
    EXPECT_NEAR(cut, 0, 0.25);
    before = recall;
  }
  EXPECT_CODE(index_->SetEffort(0.99f), Code::kInvalidArgument);
  EXPECT_CODE(index_->SetEffort(21), Code::kInvalidArgument);
}

TEST_F(CodesIndexTest, AppendedTokensAndThoseBeforeAreSearchedExactly) {
  int found = 0;
  for (int round = 0; round < 30; ++round) {
    // The best token by far sometimes lies behind the tokens that the index covers.
    const uint32_t token = kTokens + Uniform(random_, 0, kAppended - 1);
    std::vector<float> queries(data_.keys.begin() + token * kDim,
                               data_.keys.begin() + (token + 1) * kDim);
    for (float& q : queries) q *= 3;
    const SearchRequest request = Request(queries, {kFirst + 10, kFirst + kTokens + kAppended}, 50);
    const auto selection = index_->Search(request);
    ASSERT_TRUE(selection.ok());
    ExpectWellFormed(*selection, request);
    const Truth truth = TrueRanks(request, rows_);
    std::vector<double> ranks = truth.rank;
    std::nth_element(ranks.begin(), ranks.begin() + 49, ranks.end(), std::greater<>());
    for (uint32_t t = kFirst + kTokens; t < kFirst + kTokens + kAppended; ++t) {
      if (truth.rank[t - request.candidates.begin] < ranks[49] + 1e-4) continue;
      ++found;
      EXPECT_TRUE(std::binary_search(selection->ids.begin(), selection->ids.end(), t)) << t;
    }
  }
  EXPECT_GT(found, 0);
}

TEST_F(CodesIndexTest, AReaderServesInsteadOfMemory) {
  CountingReader reader(rows_, kFirst);
  SearchScratch scratch;
  for (int round = 0; round < 20; ++round) {
    const auto queries = data_.Queries(random_, 3);
    const uint32_t begin = kFirst + Uniform(random_, 0, 400);
    SearchRequest request =
        Request(queries, {begin, kFirst + kTokens + Uniform(random_, 0, kAppended)},
                Uniform(random_, 1, 200));
    const auto in_memory = index_->Search(request);
    request.keys = {nullptr, 0, 0, rows_.shape};
    request.reader = &reader;
    request.scratch = &scratch;
    reader.reads = 0;
    const auto read = index_->Search(request);
    ASSERT_TRUE(in_memory.ok() && read.ok());
    EXPECT_EQ(in_memory->ids, read->ids);
    EXPECT_EQ(in_memory->cuts[0].score, read->cuts[0].score);
    const size_t outside =
        request.candidates.end - std::min(request.candidates.end, kFirst + kTokens);
    EXPECT_GE(reader.reads, request.k + outside);
    EXPECT_LE(reader.reads, 8 * request.k + 1 + outside);
    const auto exact = MakeExactIndex({kFirst, kFirst + kTokens})->Search(request);
    request.reader = nullptr;
    request.keys = rows_.view();
    const auto exact_in_memory = MakeExactIndex({kFirst, kFirst + kTokens})->Search(request);
    ASSERT_TRUE(exact.ok() && exact_in_memory.ok());
    EXPECT_EQ(exact->ids, exact_in_memory->ids);
  }
}

TEST_F(CodesIndexTest, FewCandidatesAndManyWantedAreSearchedExactly) {
  const auto queries = data_.Queries(random_, 2);
  for (const auto& [candidates, k] : {std::pair<TokenRange, uint32_t>{{kFirst, kFirst + 500}, 10},
                                      {{kFirst, kFirst + kTokens}, kTokens / 2},
                                      {{kFirst + kTokens, kFirst + kTokens + kAppended}, 7}}) {
    const SearchRequest request = Request(queries, candidates, k);
    const auto selection = index_->Search(request);
    ASSERT_TRUE(selection.ok());
    ExpectExactSelection(*selection, request, rows_, FloatSlack(request, rows_));
    EXPECT_EQ(selection->cuts[0].kind, CutKind::kExact);
  }
}

TEST_F(CodesIndexTest, AllScoresAreToldWhenAskedFor) {
  const auto queries = data_.Queries(random_, 2);
  SearchRequest request = Request(queries, {kFirst + 5, kFirst + kTokens + kAppended}, 60);
  std::vector<float> scores;
  request.scores = &scores;
  const auto selection = index_->Search(request);
  ASSERT_TRUE(selection.ok());
  const std::vector<double> truth = TrueScores(request, rows_);
  ASSERT_EQ(scores.size(), truth.size());
  const size_t n = request.candidates.size();
  double error = 0, square = 0;
  for (uint32_t g = 0; g < 2; ++g) {
    for (const uint32_t id : selection->ids) {
      const size_t at = g * n + id - request.candidates.begin;
      EXPECT_NEAR(scores[at], truth[at], FloatSlack(request, rows_));
    }
    // All scores by codes are raised alike (all_scores.h).
    double mean = 0, raised = 0;
    for (size_t i = 0; i < n; ++i) {
      mean += truth[g * n + i] / double(n);
      raised += (scores[g * n + i] - truth[g * n + i]) / double(n);
    }
    for (size_t i = 0; i < n; ++i) {
      error += std::pow(scores[g * n + i] - truth[g * n + i] - raised, 2);
      square += std::pow(truth[g * n + i] - mean, 2);
    }
  }
  EXPECT_LT(error, 0.2 * square);
  request.k = 4000000000u;
  ASSERT_TRUE(index_->Search(request).ok());
  EXPECT_TRUE(scores.empty());
}

TEST_F(CodesIndexTest, NothingAndEverything) {
  const auto queries = data_.Queries(random_, 2);
  auto selection = index_->Search(Request(queries, {kFirst, kFirst + kTokens}, 0));
  ASSERT_TRUE(selection.ok());
  EXPECT_TRUE(selection->ids.empty());
  selection = index_->Search(Request(queries, {kFirst + 7, kFirst + 7}, 5));
  ASSERT_TRUE(selection.ok());
  EXPECT_TRUE(selection->ids.empty());
  selection = index_->Search(Request(queries, {kFirst, kFirst + kTokens}, 4000000000u));
  ASSERT_TRUE(selection.ok());
  EXPECT_EQ(selection->ids.size(), size_t{kTokens});
  EXPECT_EQ(selection->cuts[1].kind, CutKind::kExact);
}

TEST_F(CodesIndexTest, ASoftcapBendsScoresAsTheExactScanDoes) {
  double recall = 0;
  for (int round = 0; round < 10; ++round) {
    const auto queries = data_.Queries(random_, 2);
    SearchRequest request = Request(queries, {kFirst, kFirst + kTokens}, 60);
    request.layer.softcap = 8;
    const auto selection = index_->Search(request);
    ASSERT_TRUE(selection.ok());
    recall += Recall(request, *selection) / 10;
  }
  EXPECT_GT(recall, 0.85);
}

TEST_F(CodesIndexTest, BadRequestsAreRefused) {
  auto queries = data_.Queries(random_, 2);
  queries[kDim + 1] = std::numeric_limits<float>::quiet_NaN();
  auto selection = index_->Search(Request(queries, {kFirst, kFirst + kTokens}, 60));
  ASSERT_FALSE(selection.ok());
  EXPECT_NE(selection.error().message.find("query head 1"), std::string::npos);
  queries = data_.Queries(random_, 2);
  SearchRequest request = Request(queries, {kFirst, kFirst + kTokens}, 60);
  request.keys.shape.key_dim = kDim / 2;
  request.group = 4;
  selection = index_->Search(request);
  ASSERT_FALSE(selection.ok());
  EXPECT_EQ(selection.error().code, Code::kInvalidArgument);
  queries.assign(2 * kDim, 3e38f);
  selection = index_->Search(Request(queries, {kFirst, kFirst + kTokens}, 60));
  ASSERT_FALSE(selection.ok());
  EXPECT_NE(selection.error().message.find("overflow"), std::string::npos);
}

TEST_F(CodesIndexTest, EqualKeysGiveAnySetOfTheRightSize) {
  const TestRows rows(std::vector<float>(3000 * kDim, 0.5f), kDim, DType::kBf16);
  const auto index = BuildCodesIndex(rows.view(), {0, 3000});
  ASSERT_TRUE(index.ok()) << index.error().ToString();
  const auto queries = data_.Queries(random_, 3);
  SearchRequest request = Request(queries, {0, 3000}, 40);
  request.keys = rows.view();
  request.first_token = 0;
  const auto selection = (*index)->Search(request);
  ASSERT_TRUE(selection.ok());
  ExpectWellFormed(*selection, request);
}

TEST_F(CodesIndexTest, BuildsAreRefusedByName) {
  std::vector<float> keys = Normal(random_, 2000 * 8);
  keys[77 * 8] = std::numeric_limits<float>::quiet_NaN();
  const TestRows bad(keys, 8, DType::kBf16);
  auto index = BuildCodesIndex(bad.view(), {0, 2000});
  ASSERT_FALSE(index.ok());
  EXPECT_NE(index.error().message.find("row 77"), std::string::npos);
  index = BuildCodesIndex(rows_.view().Sub(0, 500), {0, 500});
  ASSERT_FALSE(index.ok());
  EXPECT_NE(index.error().message.find("exact index"), std::string::npos);
  EXPECT_FALSE(BuildCodesIndex(rows_.view(), {0, 10}).ok());
}

TEST_F(CodesIndexTest, SeveralSegmentsAreSearchedAsOne) {
  const auto build = [&](uint32_t begin, uint32_t end) {
    auto built =
        BuildCodesIndex(rows_.view().Sub(begin, end - begin), {kFirst + begin, kFirst + end});
    EXPECT_TRUE(built.ok());
    return std::move(built).value();
  };
  std::vector<IndexPart> parts;
  // The search uses a part of the first segment; between the second and the third lie tokens
  // without codes.
  parts.push_back({build(0, 2500), {kFirst, kFirst + 2011}});
  parts.push_back({build(2011, 3800), {kFirst + 2011, kFirst + 3800}});
  parts.push_back({build(3850, 6000), {kFirst + 3850, kFirst + 6000}});
  const auto joined = JoinCodesIndexes(std::move(parts));
  ASSERT_TRUE(joined.ok()) << joined.error().ToString();
  double recall = 0, alone = 0;
  for (int round = 0; round < 20; ++round) {
    const auto queries = data_.Queries(random_, 2);
    const SearchRequest request = Request(queries, {kFirst + 3, kFirst + kTokens + kAppended}, 100);
    const auto selection = (*joined)->Search(request);
    ASSERT_TRUE(selection.ok()) << selection.error().ToString();
    ExpectWellFormed(*selection, request);
    recall += Recall(request, *selection) / 20;
    const auto one = index_->Search(request);
    ASSERT_TRUE(one.ok());
    alone += Recall(request, *one) / 20;
  }
  EXPECT_GT(recall, alone - 0.05);
  EXPECT_FALSE((*joined)->Serialize().ok());
  EXPECT_FALSE((*joined)->SetEffort(1).ok());
  EXPECT_FALSE(JoinCodesIndexes({}).ok());
  parts.clear();
  parts.push_back({build(0, 2500), {kFirst, kFirst + 2501}});
  EXPECT_FALSE(JoinCodesIndexes(std::move(parts)).ok());
  parts.clear();
  parts.push_back({MakeExactIndex({0, 9}), {0, 9}});
  EXPECT_FALSE(JoinCodesIndexes(std::move(parts)).ok());
}

TEST_F(CodesIndexTest, ARoundTripSelectsTheSame) {
  const auto bytes = index_->Serialize();
  ASSERT_TRUE(bytes.ok());
  const auto loaded = LoadIndex(*bytes);
  ASSERT_TRUE(loaded.ok()) << loaded.error().ToString();
  EXPECT_EQ((*loaded)->kind(), IndexKind::kCodes);
  EXPECT_EQ((*loaded)->covered(), index_->covered());
  const auto queries = data_.Queries(random_, 4);
  const SearchRequest request = Request(queries, {kFirst, kFirst + kTokens}, 60);
  const auto before = index_->Search(request), after = (*loaded)->Search(request);
  ASSERT_TRUE(before.ok() && after.ok());
  EXPECT_EQ(before->ids, after->ids);
  const auto again = (*loaded)->Serialize();
  ASSERT_TRUE(again.ok());
  EXPECT_TRUE(*again == *bytes);
}

TEST_F(CodesIndexTest, DamagedTruncatedAndForeignBytesAreCorrupt) {
  auto bytes = index_->Serialize();
  ASSERT_TRUE(bytes.ok());
  const auto corrupt = [](std::span<const std::byte> some) {
    const auto index = LoadIndex(some);
    return !index.ok() && index.error().code == Code::kCorrupt;
  };
  for (size_t at = 0; at < bytes->size(); at += 1 + at / 40) {
    (*bytes)[at] ^= std::byte{0x10};
    EXPECT_TRUE(corrupt(*bytes)) << at;
    (*bytes)[at] ^= std::byte{0x10};
    EXPECT_TRUE(corrupt(std::span(*bytes).first(at))) << at;
  }
  const auto opened = Open(*bytes);
  ASSERT_TRUE(opened.ok());
  const auto with = [&](auto change) {
    Envelope fields = opened->fields;
    std::vector<std::byte> payload(opened->payload.begin(), opened->payload.end());
    change(fields, payload);
    return Seal(fields, payload);
  };
  using Bytes = std::vector<std::byte>;
  EXPECT_FALSE(corrupt(with([](Envelope&, Bytes&) {})));
  EXPECT_TRUE(corrupt(with([](Envelope& e, Bytes&) { e.covered.end += 64; })));
  EXPECT_TRUE(corrupt(with([](Envelope& e, Bytes&) { e.covered = {9, 9}; })));
  EXPECT_TRUE(corrupt(with([](Envelope& e, Bytes&) { e.key_dim = 0xffffffff; })));
  EXPECT_TRUE(corrupt(with([](Envelope& e, Bytes&) { e.n_lists = 1; })));
  EXPECT_TRUE(corrupt(with([](Envelope&, Bytes& p) { p[0] = std::byte{1}; })));   // version
  EXPECT_TRUE(corrupt(with([](Envelope&, Bytes& p) { p[4] = std::byte{65}; })));  // components
  EXPECT_TRUE(corrupt(with([](Envelope&, Bytes& p) { p[8] = std::byte{5}; })));   // digits
  EXPECT_TRUE(corrupt(with([](Envelope&, Bytes& p) { p.pop_back(); })));
  // The last bytes are the number of the last key in its window, or kNoKey.
  EXPECT_TRUE(corrupt(with([](Envelope&, Bytes& p) { p.back() ^= std::byte{2}; })));
}

}  // namespace
}  // namespace prefixd::index
