// Tests several requests in one search: the result of each is to the bit that of its own search,
// with shared reads.
#include <memory>

#include "tests/index/index_test_support.h"
#include "tests/support/seed.h"

namespace prefixd::index {
namespace {

constexpr uint32_t kDims = 48, kManyTokens = 5000, kAppended = 150;

class SearchManyTest : public ::testing::Test {
 protected:
  SearchManyTest()
      : random_(prefixd::testing::Seed("SearchManyTest")),
        data_(random_, kManyTokens + kAppended, kDims),
        rows_(data_.keys, kDims, DType::kBf16) {
    const auto built = [](Result<std::unique_ptr<KeyIndex>> index) {
      EXPECT_TRUE(index.ok());
      return std::move(index).value();
    };
    const auto codes = [&](uint32_t begin, uint32_t end) {
      return built(BuildCodesIndex(rows_.view().Sub(begin, end - begin), {begin, end}));
    };
    indexes_.push_back(MakeExactIndex({0, kManyTokens}));
    indexes_.push_back(codes(0, kManyTokens));
    std::vector<IndexPart> parts;
    parts.push_back({codes(0, 2222), {0, 2011}});
    parts.push_back({codes(2060, kManyTokens), {2060, kManyTokens}});
    indexes_.push_back(built(JoinCodesIndexes(std::move(parts))));
    indexes_.push_back(
        built(BuildIvfIndex(rows_.view().Sub(0, kManyTokens), {0, kManyTokens}, {})));
  }

  std::vector<float>& Queries(uint32_t group) {
    queries_.push_back(std::make_unique<std::vector<float>>(data_.Queries(random_, group)));
    return *queries_.back();
  }
  SearchRequest Request(TokenRange candidates, uint32_t group, uint32_t k) {
    return RequestOver(rows_, Queries(group), candidates, k);
  }
  static void ExpectSame(const Result<Selection>& got, const Result<Selection>& want) {
    ASSERT_EQ(got.ok(), want.ok());
    if (!want.ok()) {
      EXPECT_EQ(got.error().ToString(), want.error().ToString());
      return;
    }
    EXPECT_EQ(got->ids, want->ids);
    EXPECT_EQ(got->keys_scanned, want->keys_scanned);
    ASSERT_EQ(got->cuts.size(), want->cuts.size());
    for (size_t g = 0; g < want->cuts.size(); ++g) {
      EXPECT_EQ(got->cuts[g].score, want->cuts[g].score);
      EXPECT_EQ(got->cuts[g].kind, want->cuts[g].kind);
    }
  }

  Random random_;
  AttentionLike data_;
  TestRows rows_;
  std::vector<std::unique_ptr<KeyIndex>> indexes_;
  std::vector<std::unique_ptr<std::vector<float>>> queries_;
};

TEST_F(SearchManyTest, FindsWhatEachFindsAlone) {
  const TokenRange ranges[] = {
      {0, kManyTokens + kAppended}, {7, kManyTokens}, {1500, 4321}, {900, 940}};
  std::vector<SearchRequest> requests;
  for (uint32_t i = 0; i < 24; ++i) {
    const TokenRange range = ranges[std::min(Uniform(random_, 0, 5), 3u)];
    requests.push_back(Request(range, Uniform(random_, 1, 9), Uniform(random_, 0, 120)));
  }
  requests.push_back(Request({0, kManyTokens}, 2, kManyTokens));  // as many as there are
  requests.push_back(Request({0, kManyTokens}, 2, 10));
  queries_.back()->at(kDims + 3) = std::numeric_limits<float>::quiet_NaN();
  requests.push_back(Request({0, kManyTokens}, 2, 10));
  for (float& x : *queries_.back()) x = 3e38f;  // scores that overflow
  requests.push_back(Request({0, kManyTokens}, 2, 10));
  requests.back().keys.shape.key_dim = kDims / 2;  // refused for its other keys

  SearchScratch shared;
  for (const auto& index : indexes_) {
    SCOPED_TRACE(IndexName(index->kind()));
    std::vector<std::vector<float>> scores(requests.size()), scores_alone(requests.size());
    std::vector<Result<Selection>> alone;
    for (size_t i = 0; i < requests.size(); ++i) {
      requests[i].scratch = nullptr;
      requests[i].scores = &scores_alone[i];
      alone.push_back(index->Search(requests[i]));
      requests[i].scratch = i % 4 == 3 ? nullptr : &shared;
      requests[i].scores = &scores[i];
    }
    const auto together = index->SearchMany(requests);
    ASSERT_EQ(together.size(), requests.size());
    for (size_t i = 0; i < requests.size(); ++i) {
      SCOPED_TRACE(i);
      ExpectSame(together[i], alone[i]);
      if (alone[i].ok()) {
        EXPECT_EQ(scores[i], scores_alone[i]);
      }
    }
    EXPECT_TRUE(index->SearchMany({}).empty());
  }
}

TEST_F(SearchManyTest, ReadsTogetherWhatAllOfThemNeed) {
  for (const auto& index : indexes_) {
    if (index->kind() == IndexKind::kIvf) continue;
    SCOPED_TRACE(IndexName(index->kind()));
    CountingReader reader(rows_);
    SearchScratch scratch;
    std::vector<std::vector<std::byte>> keys(4), keys_alone(4);
    std::vector<SearchRequest> requests;
    for (uint32_t i = 0; i < 4; ++i) {
      requests.push_back(Request({0, kManyTokens}, 3, 50));
      requests.back().reader = &reader;
      requests.back().scratch = &scratch;
    }
    uint64_t bytes_alone = 0;
    std::vector<Result<Selection>> alone;
    for (uint32_t i = 0; i < 4; ++i) {
      requests[i].selected_keys = &keys_alone[i];
      alone.push_back(index->Search(requests[i]));
      ASSERT_TRUE(alone.back().ok());
      bytes_alone += alone.back()->bytes_scanned;
      requests[i].selected_keys = &keys[i];
    }
    const size_t read_alone = reader.reads;
    reader.reads = 0;
    const auto together = index->SearchMany(requests);
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < 4; ++i) {
      ExpectSame(together[i], alone[i]);
      EXPECT_EQ(keys[i], keys_alone[i]);
      bytes += together[i]->bytes_scanned;
    }
    if (index->kind() == IndexKind::kExact) {
      EXPECT_EQ(bytes * 4, bytes_alone);
      EXPECT_EQ(reader.reads * 4, read_alone);
    } else {
      EXPECT_LT(bytes, bytes_alone);
      EXPECT_EQ(reader.reads, read_alone);  // each has its own short list
    }
  }
}

}  // namespace
}  // namespace prefixd::index
