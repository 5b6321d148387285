// Tests G-KV's redundancy against its formula in float64.
#include "runtime/retention/redundancy.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

#include "tests/support/seed.h"

namespace prefixd {
namespace {

// Keys in the store's dtype, some of them doubles of others up to their length.
struct Keys {
  Keys(RowShape row, uint32_t n, uint64_t seed) : shape(row), count(n), floats(n * row.key_dim) {
    std::mt19937_64 rng(seed);
    std::normal_distribution<float> normal;
    for (float& x : floats) x = normal(rng);
    for (uint32_t t = 3; t < n; t += 4) {
      const float* of = floats.data() + rng() % t * row.key_dim;
      const float length = 0.5F + 3 * std::abs(normal(rng));
      for (uint32_t i = 0; i < row.key_dim; ++i) {
        floats[t * row.key_dim + i] = length * (of[i] + 0.1F * normal(rng));
      }
    }
    bytes.resize(n * row.bytes());
    for (uint32_t t = 0; t < n; ++t) {
      const auto key = std::span(floats).subspan(size_t{t} * row.key_dim, row.key_dim);
      FromFloat(row.dtype, key, bytes.data() + t * row.bytes());
      ToFloat(row.dtype, bytes.data() + t * row.bytes(), key);  // as stored
    }
  }
  RowsView view() const { return {bytes.data(), count, shape.bytes(), shape}; }
  double Cosine(uint32_t a, uint32_t b) const {
    double ab = 0, aa = 0, bb = 0;
    for (uint32_t i = 0; i < shape.key_dim; ++i) {
      const double x = floats[a * shape.key_dim + i], y = floats[b * shape.key_dim + i];
      ab += x * y, aa += x * x, bb += y * y;
    }
    return aa == 0 || bb == 0 ? 0 : ab / std::sqrt(aa * bb);
  }

  RowShape shape;
  uint32_t count;
  std::vector<float> floats;
  std::vector<std::byte> bytes;
};

bool AtThreshold(const Keys& keys, uint32_t token) {
  for (uint32_t other = 0; other < keys.count; ++other) {
    if (std::abs(keys.Cosine(token, other) - kAlike) < 1e-5) return true;
  }
  return false;
}

std::vector<double> Expected(const Keys& keys, TokenRange region) {
  std::vector<double> r;
  for (uint32_t t = region.begin; t < region.end; ++t) {
    double sum = 0;
    for (uint32_t other = 0; other < keys.count && t + kRedundantNewest < keys.count; ++other) {
      const double cosine = keys.Cosine(t, other);
      if (cosine > kAlike) sum += cosine;
    }
    r.push_back(sum / keys.count);
  }
  double all = 0, most = 0;
  for (const double x : r) all += std::exp(x);
  for (const double x : r) most = std::max(most, std::exp(x) / all);
  for (double& x : r) x = std::exp(x) / all / most;
  return r;
}

TEST(RedundancyTest, EqualsTheFormula) {
  const uint64_t seed = testing::Seed("RedundancyTest.EqualsTheFormula");
  for (const DType dtype : {DType::kF32, DType::kBf16, DType::kF16}) {
    for (const uint32_t dim : {16u, 64u, 80u}) {
      const Keys keys({dim, 8, dtype}, 211, seed + dim);
      for (const TokenRange region : {TokenRange{4, 147}, TokenRange{0, 211}, TokenRange{199, 205},
                                      TokenRange{7, 8}, TokenRange{9, 9}}) {
        const auto got = Redundancy(keys.view(), region);
        const auto want = Expected(keys, region);
        ASSERT_EQ(got.size(), want.size());
        for (size_t i = 0; i < got.size(); ++i) {
          // Rounding may move one cosine over the threshold, which counts half of one.
          EXPECT_NEAR(got[i], want[i], 1e-5 + (AtThreshold(keys, region.begin + i) ? 0.6 / 211 : 0))
              << "token " << region.begin + i << ", seed " << seed;
        }
      }
    }
  }
}

// A text of columns: the first of every eight tokens are alike, and two others of every eight.
TEST(RedundancyTest, LongPromptsThatRepeatThemselvesMeetASample) {
  const uint64_t seed = testing::Seed("LongPromptsThatRepeatThemselvesMeetASample");
  for (const uint32_t n : {kCompared + 1, 2 * kCompared, 3 * kCompared + 100}) {
    Keys keys({16, 8, DType::kF32}, n, seed);
    auto* rows = reinterpret_cast<float*>(keys.bytes.data());
    const size_t stride = keys.shape.bytes() / sizeof(float);
    for (uint32_t t = 0; t < n; ++t) {
      const uint32_t column = t % 8 == 0 ? 0 : t % 4 == 1 ? 1 : 2;
      if (column == 2) continue;
      for (uint32_t i = 0; i < 16; ++i) rows[t * stride + i] += i == column ? 1000.0F : 0.0F;
      std::copy_n(rows + t * stride, 16, keys.floats.begin() + t * 16);
    }
    const TokenRange region{n / 2, n / 2 + 96};
    const auto got = Redundancy(keys.view(), region), want = Expected(keys, region);
    for (size_t i = 0; i < got.size(); ++i) {
      // Means of 1/8, 1/4 and those of single keys, less the largest.
      EXPECT_NEAR(std::log(got[i]), std::log(want[i]), 0.04) << i << " of " << n << ", " << seed;
    }
    EXPECT_LT(*std::min_element(want.begin(), want.end()), std::exp(-0.15));
  }
}

TEST(RedundancyTest, DoublesAreRedundantAndZerosAreNot) {
  constexpr uint32_t kTokens = 60;
  Keys keys({32, 8, DType::kF32}, kTokens, 1);
  // Token 10 is the direction of every fourth one, token 22 has none.
  auto* rows = reinterpret_cast<float*>(keys.bytes.data());
  const size_t stride = keys.shape.bytes() / sizeof(float);
  for (uint32_t t = 0; t < kTokens; t += 4) {
    for (uint32_t i = 0; i < 32; ++i) rows[t * stride + i] = (t + 1) * rows[10 * stride + i];
  }
  std::fill_n(rows + 22 * stride, 32, 0.0F);
  const auto r = Redundancy(keys.view(), {0, kTokens - kRedundantNewest});
  EXPECT_NEAR(r[10], 1, 1e-6);
  EXPECT_NEAR(r[12], 1, 1e-6);
  for (uint32_t t = 0; t < r.size(); ++t) {
    EXPECT_GT(r[t], 0);
    EXPECT_LE(r[22], r[t]) << t;
  }
}

TEST(RedundancyTest, IsTakenOffTheGlobalScore) {
  const double inf = std::numeric_limits<double>::infinity();
  std::vector<double> scores = {0.5, 0.5, inf, 0};
  TakeOffRedundancy(std::vector<double>{1, 0.5, 1, 0.2}, scores);
  EXPECT_DOUBLE_EQ(scores[0], 0.9 * 0.5 - 0.1);
  EXPECT_DOUBLE_EQ(scores[1], 0.9 * 0.5 - 0.05);
  EXPECT_EQ(scores[2], inf);
  EXPECT_DOUBLE_EQ(scores[3], -0.02);
}

}  // namespace
}  // namespace prefixd
