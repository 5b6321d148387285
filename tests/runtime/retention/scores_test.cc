// Tests retention policies against what they are defined to be, in the simplest words.
#include "runtime/retention/scores.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "tests/support/expect_ok.h"
#include "tests/support/seed.h"

namespace prefixd {
namespace {

constexpr TokenRange kRegion{4, 44};
constexpr uint32_t kTokens = 60, kGroup = 3;

// Attention of one query head over the tokens that it saw.
std::vector<double> Softmax(std::span<const float> scores, uint32_t seen) {
  std::vector<double> p(scores.size(), 0.0);
  double sum = 0;
  for (uint32_t t = 0; t < seen; ++t) sum += std::exp(double{scores[t]});
  for (uint32_t t = 0; t < seen; ++t) p[t] = std::exp(double{scores[t]}) / sum;
  return p;
}

class RetentionTest : public ::testing::Test {
 protected:
  void Make(size_t queries) {
    std::mt19937_64 rng(testing::Seed("RetentionTest"));
    std::normal_distribution<float> normal(0, 2);
    for (size_t s = 0; s < queries; ++s) {
      std::vector<float> scores(size_t{kGroup} * kTokens);
      for (float& x : scores) x = normal(rng);
      const auto position = static_cast<uint32_t>(30 + s % 30);
      observed_.push_back(Observe(scores, kGroup, position, kRegion));
      std::vector<double> largest(kTokens, 0.0);
      for (uint32_t g = 0; g < kGroup; ++g) {
        const auto p = Softmax(std::span(scores).subspan(g * kTokens, kTokens), position + 1);
        for (uint32_t t = 0; t < kTokens; ++t) largest[t] = std::max(largest[t], p[t]);
      }
      attention_.push_back(largest);
    }
  }
  // The mean over queries [begin, end) that saw the token; NaN: none did.
  double Mean(uint32_t token, size_t begin, size_t end) const {
    double sum = 0, n = 0;
    for (size_t s = begin; s < end; ++s) {
      if (observed_[s].position < token) continue;
      sum += attention_[s][token];
      ++n;
    }
    return sum / n;
  }

  std::vector<ObservedQuery> observed_;
  std::vector<std::vector<double>> attention_;  // [queries][kTokens]
};

TEST_F(RetentionTest, LocalIsTheMeanOverTheLastQueries) {
  Make(25);
  const auto local = RetentionScores(RetentionPolicy::kLocal, kRegion, observed_);
  const auto pooled = RetentionScores(RetentionPolicy::kSnapKv, kRegion, observed_);
  for (uint32_t t = kRegion.begin; t < kRegion.end; ++t) {
    EXPECT_NEAR(local[t - kRegion.begin], Mean(t, 25 - kObservedQueries, 25), 1e-12) << t;
    double largest = 0;
    for (uint32_t near = t - 2; near <= t + 2; ++near) {
      if (kRegion.contains(near)) largest = std::max(largest, Mean(near, 9, 25));
    }
    EXPECT_NEAR(pooled[t - kRegion.begin], largest, 1e-12) << t;
  }
}

TEST_F(RetentionTest, GlobalRemembersTheLargestDecayedShare) {
  Make(2 * kObservedQueries + 5);
  const auto scores = RetentionScores(RetentionPolicy::kGlobal, kRegion, observed_);
  std::vector<double> want(kRegion.size(), std::nan(""));
  size_t begin = 0;
  for (const size_t end : {size_t{5}, size_t{21}, size_t{37}}) {
    double top = 0;
    for (uint32_t t = kRegion.begin; t < kRegion.end; ++t)
      top = std::fmax(top, Mean(t, begin, end));
    for (uint32_t t = kRegion.begin; t < kRegion.end; ++t) {
      const double now = Mean(t, begin, end) / top;
      double& f = want[t - kRegion.begin];
      if (!std::isnan(now)) f = std::isnan(f) ? now : std::max(0.8 * f, now);
    }
    begin = end;
  }
  for (size_t i = 0; i < want.size(); ++i) EXPECT_NEAR(scores[i], want[i], 1e-12) << i;
}

TEST_F(RetentionTest, WhatNobodySawStaysBeforeAllElse) {
  Make(3);  // none saw tokens behind 32
  for (const auto policy :
       {RetentionPolicy::kLocal, RetentionPolicy::kSnapKv, RetentionPolicy::kGlobal}) {
    const auto scores = RetentionScores(policy, kRegion, observed_);
    const auto kept = HighestScored(scores, kRegion, 12);
    ASSERT_EQ(kept.size(), 12u);
    EXPECT_EQ(std::vector(kept.end() - 11, kept.end()),
              (std::vector<uint32_t>{33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43}));
    EXPECT_LT(kept.front(), 33u);
  }
}

TEST_F(RetentionTest, WindowKeepsTheNewest) {
  const auto scores = RetentionScores(RetentionPolicy::kWindow, kRegion, {});
  EXPECT_EQ(HighestScored(scores, kRegion, 3), (std::vector<uint32_t>{41, 42, 43}));
  EXPECT_EQ(HighestScored(scores, kRegion, 100).size(), kRegion.size());
  EXPECT_CODE(RetentionPolicyFromName("lru"), Code::kInvalidArgument);
  EXPECT_EQ(*RetentionPolicyFromName("gkv"), RetentionPolicy::kGkv);
  EXPECT_EQ(*RetentionPolicyFromName("global"), RetentionPolicy::kGlobal);
}

}  // namespace
}  // namespace prefixd
