// Tests rankings of tokens by retention policies beside float64 sums over plain lists.
#include "runtime/retention/rank_tokens.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "attention/rows/rows.h"
#include "runtime/retention/redundancy.h"
#include "tests/support/random_kv.h"
#include "tests/support/seed.h"

namespace prefixd {
namespace {

constexpr uint32_t kKeyDim = 16, kQueryHeads = 3, kHeldRows = 90;
constexpr TokenRange kCandidates{4, 70};

class RankTokensTest : public ::testing::Test {
 protected:
  RankTokensTest() : random_(testing::Seed("RankTokens")) {
    keys_ = random_.Normals(size_t{kHeldRows} * kKeyDim);
    bytes_.resize(kHeldRows * shape_.bytes());
    for (uint32_t i = 0; i < kHeldRows; ++i) {
      std::vector<float> row(keys_.begin() + i * kKeyDim, keys_.begin() + (i + 1) * kKeyDim);
      const auto value = random_.Normals(kKeyDim);
      row.insert(row.end(), value.begin(), value.end());
      FromFloat(shape_.dtype, row, &bytes_[i * shape_.bytes()]);
    }
    for (uint32_t i = 0; i < kObservedQueries; ++i) {
      q_.push_back(random_.Normals(size_t{kQueryHeads} * kKeyDim));
    }
    for (uint32_t i = 0; i < kObservedQueries; ++i) seen_.push_back({50 + i * 2, q_[i]});
  }
  RankInput Input(RetentionPolicy policy) const {
    return {.policy = policy,
            .layer = {.scale = 0.4f},
            .group = kQueryHeads,
            .rows = {bytes_.data(), kHeldRows, shape_.bytes(), shape_},
            .region = kCandidates,
            .queries = seen_};
  }
  // What one query gives to each row, of its heads the largest share or their mean.
  std::vector<double> Given(const SeenQuery& query, bool mean) const {
    std::vector<double> out(kHeldRows, 0.0);
    for (uint32_t g = 0; g < kQueryHeads; ++g) {
      std::vector<double> e(kHeldRows, 0.0);
      double sum = 0;
      for (uint32_t t = 0; t <= query.position; ++t) {
        double s = 0;
        for (uint32_t d = 0; d < kKeyDim; ++d) {
          s += double{query.q[g * kKeyDim + d]} * keys_[t * kKeyDim + d];
        }
        sum += e[t] = std::exp(0.4f * s);
      }
      for (uint32_t t = 0; t < kHeldRows; ++t) {
        out[t] = mean ? out[t] + e[t] / sum / kQueryHeads : std::max(out[t], e[t] / sum);
      }
    }
    return out;
  }
  // The mean over the queries that saw a token; infinity where none did.
  std::vector<double> Local() const {
    std::vector<double> sum(kCandidates.size(), 0.0), saw(kCandidates.size(), 0.0);
    for (const SeenQuery& query : seen_) {
      const auto given = Given(query, false);
      for (uint32_t t = kCandidates.begin; t < kCandidates.end; ++t) {
        if (t > query.position) continue;
        sum[t - kCandidates.begin] += given[t];
        ++saw[t - kCandidates.begin];
      }
    }
    for (size_t i = 0; i < sum.size(); ++i) {
      sum[i] = saw[i] > 0 ? sum[i] / saw[i] : std::numeric_limits<double>::infinity();
    }
    return sum;
  }
  static void ExpectAll(std::span<const double> got, std::span<const double> want) {
    ASSERT_EQ(got.size(), want.size());
    for (size_t i = 0; i < want.size(); ++i) {
      if (std::isinf(want[i])) {
        EXPECT_EQ(got[i], want[i]) << i;
      } else {
        EXPECT_NEAR(got[i], want[i], 2e-6 * (1 + std::abs(want[i]))) << i;
      }
    }
  }

  const RowShape shape_{kKeyDim, kKeyDim, DType::kF32};
  testing::Random random_;
  std::vector<float> keys_;
  std::vector<std::byte> bytes_;
  std::vector<std::vector<float>> q_;
  std::vector<SeenQuery> seen_;
};

TEST_F(RankTokensTest, LocalAndTovaLookAtNothingBefore) {
  const Ranking local = RankTokens(Input(RetentionPolicy::kLocal));
  ExpectAll(local.scores, Local());
  EXPECT_TRUE(local.memory.empty());
  const Ranking tova = RankTokens(Input(RetentionPolicy::kTova));
  const auto last = Given(seen_.back(), true);
  ExpectAll(tova.scores, std::span(last).subspan(kCandidates.begin, kCandidates.size()));
  EXPECT_TRUE(tova.memory.empty());
  RankInput window = Input(RetentionPolicy::kWindow);
  EXPECT_TRUE(std::ranges::is_sorted(RankTokens(window).scores));
}

TEST_F(RankTokensTest, H2oAddsUpWhatAllQueriesGave) {
  std::vector<double> past(kCandidates.size());
  for (double& x : past) x = random_.Int(0, 3) == 0 ? std::nan("") : 0.01 * random_.Int(0, 100);
  RankInput in = Input(RetentionPolicy::kH2o);
  in.past = past;
  std::vector<double> want(kCandidates.size(), std::numeric_limits<double>::infinity());
  for (uint32_t t = kCandidates.begin; t < kCandidates.end; ++t) {
    double& sum = want[t - kCandidates.begin];
    if (!std::isnan(past[t - kCandidates.begin])) sum = past[t - kCandidates.begin];
    for (const SeenQuery& query : seen_) {
      if (t <= query.position) sum = (std::isinf(sum) ? 0 : sum) + Given(query, true)[t];
    }
  }
  const Ranking got = RankTokens(in);
  ExpectAll(got.scores, want);
  ASSERT_EQ(got.memory.size(), want.size());
  for (size_t i = 0; i < want.size(); ++i)
    EXPECT_EQ(std::isnan(got.memory[i]), std::isinf(want[i]));
}

// The three forms of the global score, and G-KV, which takes off what doubles other keys, and
// remembers what it was before.
TEST_F(RankTokensTest, GlobalScoresJoinTheShareOfNowWithThePast) {
  std::vector<double> past(kCandidates.size());
  for (size_t i = 0; i < past.size(); ++i) past[i] = i % 3 == 0 ? std::nan("") : 0.02 * double(i);
  std::vector<double> now = Local();
  double largest = 0;
  for (const double x : now) largest = std::isinf(x) ? largest : std::max(largest, x);
  for (double& x : now) x /= largest;
  const auto joined = [&](const auto& join) {
    std::vector<double> want = now;
    for (size_t i = 0; i < want.size(); ++i) {
      if (std::isnan(past[i])) continue;
      want[i] = std::isinf(now[i]) ? past[i] : join(past[i], now[i]);
    }
    return want;
  };
  const auto rank = [&](RetentionPolicy policy) {
    RankInput in = Input(policy);
    in.past = past;
    return RankTokens(in);
  };
  const auto max = joined([](double p, double s) { return std::max(0.8 * p, s); });
  ExpectAll(rank(RetentionPolicy::kGlobal).scores, max);
  ExpectAll(rank(RetentionPolicy::kGlobalSum).scores,
            joined([](double p, double s) { return 0.8 * p + s; }));
  ExpectAll(rank(RetentionPolicy::kGlobalMean).scores,
            joined([](double p, double s) { return 0.8 * p + 0.2 * s; }));
  const Ranking gkv = rank(RetentionPolicy::kGkv);
  const auto doubles = Redundancy(Input(RetentionPolicy::kGkv).rows, kCandidates);
  std::vector<double> less = max;
  for (size_t i = 0; i < less.size(); ++i) less[i] = 0.9 * max[i] - 0.1 * doubles[i];
  ExpectAll(gkv.scores, less);
  for (size_t i = 0; i < max.size(); ++i) {
    EXPECT_EQ(std::isnan(gkv.memory[i]), std::isinf(max[i])) << i;
    if (std::isinf(max[i])) continue;
    EXPECT_NEAR(gkv.memory[i], max[i], 2e-6 * (1 + max[i])) << i;
  }
}

// A scorer's tokens keep their rank, and new ones age by where they lie in the text, not by how
// many rows are left before them.
TEST_F(RankTokensTest, ScorersRankEachTokenOnce) {
  TokenScorer scorer;
  scorer.mean.assign(2 * kKeyDim, 0.1f);
  scorer.scale.assign(2 * kKeyDim, 1.5f);
  scorer.log_decay = -0.01;
  scorer.window = 8;
  constexpr uint32_t kHiddenUnits = 5;
  scorer.weights = MlpWeights{random_.Normals(2 * kKeyDim * kHiddenUnits),
                              random_.Normals(kHiddenUnits), random_.Normals(kHiddenUnits), 0.3f};
  RankInput in = Input(RetentionPolicy::kKvPop);
  in.queries = {};
  in.scorer = &scorer;
  const Ranking alone = RankTokens(in);
  EXPECT_EQ(alone.scores, TokenPriorities(scorer, in.rows, kCandidates));
  // The text has a gap of 1,000 tokens before row 40; what comes before it was ranked earlier.
  std::vector<uint32_t> positions(kHeldRows);
  for (uint32_t i = 0; i < kHeldRows; ++i) positions[i] = i < 40 ? i : 1000 + i;
  std::vector<double> past(kCandidates.size(), std::nan(""));
  for (uint32_t t = kCandidates.begin; t < 40; ++t) past[t - kCandidates.begin] = -double(t);
  in.past = past;
  in.positions = positions;
  const Ranking later = RankTokens(in);
  for (uint32_t t = kCandidates.begin; t < kCandidates.end; ++t) {
    const size_t i = t - kCandidates.begin;
    EXPECT_NEAR(later.scores[i], t < 40 ? -double(t) : alone.scores[i] + 1000 * 0.01, 1e-9) << t;
    EXPECT_EQ(later.memory[i], later.scores[i]);
  }
}

// Scores that overflow must not end the search for the best in disorder.
TEST_F(RankTokensTest, OverflowIsWorthNothing) {
  for (float& x : q_.back()) x = 3e38f;
  const Ranking got = RankTokens(Input(RetentionPolicy::kTova));
  EXPECT_TRUE(std::ranges::none_of(got.scores, [](double x) { return std::isnan(x); }));
  EXPECT_EQ(HighestScored(got.scores, kCandidates, 10).size(), 10u);
}

}  // namespace
}  // namespace prefixd
