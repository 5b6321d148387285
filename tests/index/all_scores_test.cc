// Tests the scores that a search by codes gives for keys that it has not scored exactly: each may
// be wrong, but their mass is right, whatever their codes miss.
#include "index/code_search/all_scores.h"

#include <functional>

#include "tests/index/index_test_support.h"
#include "tests/support/seed.h"

namespace prefixd::index {
namespace {

constexpr uint32_t kDim = 64, kTokens = 5000;

double LogSumExp(std::span<const double> x) {
  const double top = *std::max_element(x.begin(), x.end());
  double sum = 0;
  for (const double v : x) sum += std::exp(v - top);
  return top + std::log(sum);
}

// Misjudged measures how far the log-sum-exp of the remaining keys is from the truth, over many
// searches.
struct Misjudged {
  double sum = 0, weighted = 0, weighted_square = 0, share = 0, n = 0;
  double bias() const { return sum / n; }
  // Returns the error in units of the whole: the error of a step's lse.
  double of_all() const { return weighted / n; }
  double rms_of_all() const { return std::sqrt(weighted_square / n); }
};

void Judge(const KeyIndex& index, SearchRequest request, const TestRows& rows, Misjudged& out) {
  std::vector<float> scores;
  request.scores = &scores;
  const auto selection = index.Search(request);
  ASSERT_TRUE(selection.ok()) << selection.error().ToString();
  const std::vector<double> truth = TrueScores(request, rows);
  ASSERT_EQ(scores.size(), truth.size());
  const size_t n = request.candidates.size();
  std::vector<bool> taken(n, false);
  for (const uint32_t id : selection->ids) taken[id - request.candidates.begin] = true;
  for (uint32_t g = 0; g < request.group; ++g) {
    std::vector<double> told, left;
    for (size_t i = 0; i < n; ++i) {
      if (taken[i]) continue;
      told.push_back(scores[g * n + i]);
      left.push_back(truth[g * n + i]);
    }
    const double all = LogSumExp(std::span(truth).subspan(g * n, n)), of_left = LogSumExp(left);
    const double error = LogSumExp(told) - of_left, share = std::exp(of_left - all);
    out.sum += error;
    out.weighted += share * error;
    out.weighted_square += share * error * share * error;
    out.share += share;
    out.n += 1;
  }
}

class AllScoresTest : public ::testing::Test {
 protected:
  AllScoresTest() : random_(prefixd::testing::Seed("AllScoresTest")) {}

  // Makes keys by `key`, which fills in one.
  TestRows Rows(const std::function<void(uint32_t, std::span<float>)>& key) {
    std::vector<float> keys = Normal(random_, size_t{kTokens} * kDim);
    for (uint32_t i = 0; i < kTokens; ++i) {
      key(i, std::span(keys).subspan(size_t{i} * kDim, kDim));
    }
    return TestRows(keys, kDim, DType::kBf16);
  }

  Random random_;
};

TEST_F(AllScoresTest, TheMassOfWhatIsNotRetrievedIsRight) {
  const std::vector<float> centres = Normal(random_, 64 * kDim, 2);
  struct Case {
    const char* name;
    float gain;    // gain of the queries
    double limit;  // bound of the mean error; without the draws the error exceeds it
    std::function<void(uint32_t, std::span<float>)> key;
  };
  const Case cases[] = {
      {"nothing in common", 1, 0.02, [](uint32_t, std::span<float>) {}},
      {"nothing in common, strong queries", 3, 0.03, [](uint32_t, std::span<float>) {}},
      {"channel of mean 30", 1, 0.02, [](uint32_t, std::span<float> k) { k[5] += 30; }},
      {"clusters of unlike width", 1, 0.08,
       [&](uint32_t, std::span<float> k) {
         const uint32_t c = Uniform(random_, 0, 63);
         const float width = 0.05f * std::pow(1.07f, float(c));
         for (uint32_t d = 0; d < kDim; ++d) k[d] = centres[c * kDim + d] + width * k[d];
       }},
      {"half of them identical", 2, 0.04,
       [](uint32_t i, std::span<float> k) {
         if (i % 2) std::fill(k.begin(), k.end(), 0.7f);
       }},
      {"identical", 2, 1e-4,
       [](uint32_t, std::span<float> k) { std::fill(k.begin(), k.end(), 0.7f); }},
      {"of unlike size", 1.5f, 0.03,
       [&](uint32_t, std::span<float> k) {
         const float size = 0.5f + float(Uniform(random_, 0, 1000)) / 1000;
         for (float& x : k) x *= size;
       }},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.name);
    const TestRows rows = Rows(c.key);
    const auto index = BuildCodesIndex(rows.view(), {0, kTokens});
    ASSERT_TRUE(index.ok()) << index.error().ToString();
    for (const uint32_t k : {0u, 60u, 240u}) {
      Misjudged misjudged;
      for (int round = 0; round < 20; ++round) {
        const std::vector<float> queries = Normal(random_, 2 * kDim, c.gain);
        Judge(**index, RequestOver(rows, queries, {0, kTokens}, k), rows, misjudged);
      }
      // With nothing retrieved, the few keys of most mass are judged by their codes, too.
      EXPECT_LT(std::fabs(misjudged.of_all()), k == 0 ? 6 * c.limit : c.limit) << "K " << k;
      if (k > 0) {
        EXPECT_LT(misjudged.rms_of_all(), 10 * c.limit) << "K " << k;
      }
    }
  }
}

TEST_F(AllScoresTest, SegmentsTokensWithoutCodesAndSoftcapsToo) {
  const AttentionLike data(random_, kTokens, kDim);
  const TestRows rows(data.keys, kDim, DType::kBf16);
  std::vector<IndexPart> parts;
  parts.push_back({*BuildCodesIndex(rows.view().Sub(0, 3000), {0, 3000}), {0, 2500}});
  parts.push_back({*BuildCodesIndex(rows.view().Sub(3000, 1500), {3000, 4500}), {3100, 4500}});
  const auto joined = JoinCodesIndexes(std::move(parts));
  ASSERT_TRUE(joined.ok());
  for (const float softcap : {0.0f, 8.0f}) {
    Misjudged misjudged;
    for (int round = 0; round < 30; ++round) {
      const auto queries = data.Queries(random_, 3);
      SearchRequest request = RequestOver(rows, queries, {Uniform(random_, 0, 900), kTokens}, 100);
      request.layer.softcap = softcap;
      Judge(**joined, request, rows, misjudged);
    }
    EXPECT_LT(std::fabs(misjudged.of_all()), 0.03) << softcap;
    EXPECT_LT(misjudged.rms_of_all(), 0.1) << softcap;
  }
}

TEST_F(AllScoresTest, AReaderServesAndItsKeysAreStillThoseSelected) {
  const AttentionLike data(random_, kTokens, kDim);
  const TestRows rows(data.keys, kDim, DType::kBf16);
  const auto index = BuildCodesIndex(rows.view(), {0, kTokens});
  ASSERT_TRUE(index.ok());
  CountingReader reader(rows);
  for (int round = 0; round < 10; ++round) {
    const auto queries = data.Queries(random_, 2);
    SearchRequest request = RequestOver(rows, queries, {0, kTokens}, 60);
    std::vector<float> in_memory, read;
    request.scores = &in_memory;
    const auto selection = (*index)->Search(request);
    request.scores = nullptr;
    SearchScratch scratch;
    std::vector<std::byte> keys;
    request.keys = {nullptr, 0, 0, rows.shape};
    request.reader = &reader;
    request.scratch = &scratch;
    request.selected_keys = &keys;
    reader.reads = 0;
    const auto plain = (*index)->Search(request);
    const size_t listed = reader.reads;
    request.scores = &read;
    reader.reads = 0;
    const auto by_reader = (*index)->Search(request);
    ASSERT_TRUE(plain.ok() && selection.ok() && by_reader.ok());
    EXPECT_EQ(in_memory, read);
    // Drawn keys count as read, and change no choice.
    EXPECT_EQ(plain->ids, by_reader->ids);
    ASSERT_GT(reader.reads, listed);
    EXPECT_LE(reader.reads, listed + 2 * kDrawnKeys);
    EXPECT_EQ(by_reader->bytes_scanned - plain->bytes_scanned,
              (reader.reads - listed) * rows.shape.key_bytes());
    ASSERT_EQ(keys.size(), 60 * rows.shape.key_bytes());
    for (size_t i = 0; i < 60; ++i) {
      EXPECT_EQ(std::memcmp(keys.data() + i * rows.shape.key_bytes(),
                            rows.view().key(by_reader->ids[i]), rows.shape.key_bytes()),
                0);
    }
  }
}

}  // namespace
}  // namespace prefixd::index
