#include "index/code_search/code_training.h"

#include <utility>

#include "index/code_search/code_ranks.h"
#include "index/code_search/symmetric_eigen.h"
#include "index/codes/block_queries.h"
#include "index/codes/code_scan.h"
#include "tests/index/index_test_support.h"
#include "tests/support/seed.h"

namespace prefixd::index {
namespace {

TEST(SymmetricEigen, VectorsDiagonaliseTheMatrix) {
  Random random(prefixd::testing::Seed("VectorsDiagonaliseTheMatrix"));
  for (const uint32_t n : {1u, 2u, 17u, 64u}) {
    std::vector<double> m(size_t{n} * n);
    for (uint32_t a = 0; a < n; ++a) {
      for (uint32_t b = 0; b <= a; ++b) {
        m[a * n + b] = m[b * n + a] = std::normal_distribution<double>()(random);
      }
    }
    const auto eigen = SymmetricEigen(m, n);
    ASSERT_TRUE(eigen.ok());
    for (uint32_t i = 0; i < n; ++i) {
      if (i > 0) {
        EXPECT_LE(eigen->values[i], eigen->values[i - 1]);
      }
      const double* v = eigen->vectors.data() + size_t{i} * n;
      for (uint32_t a = 0; a < n; ++a) {
        double mv = 0;
        for (uint32_t b = 0; b < n; ++b) mv += m[a * n + b] * v[b];
        EXPECT_NEAR(mv, eigen->values[i] * v[a], 1e-9 * n);
      }
    }
  }
}

// Returns the mean squared error of scores of decoded keys, over the variance of the scores.
double RelativeError(const EncodedKeys& encoded, const TestRows& rows,
                     std::span<const float> queries) {
  const uint32_t dim = rows.shape.key_dim;
  const size_t n = rows.count;
  const BlockCodes codes(dim, n, encoded.arrays.bytes());
  EXPECT_TRUE(encoded.book.Validate().ok());
  EXPECT_TRUE(codes.Validate().ok());
  std::vector<float> decoded(dim);
  double error = 0, square = 0, sum = 0, count = 0;
  for (size_t place = 0; place < n; ++place) {
    DecodeBlockKey(encoded.book, codes, place, decoded);
    const size_t i = codes.key(place);
    for (size_t q = 0; q < queries.size(); q += dim) {
      double truth = 0, approximate = 0;
      for (uint32_t d = 0; d < dim; ++d) {
        truth += double{queries[q + d]} * rows.rounded[i * dim + d];
        approximate += double{queries[q + d]} * decoded[d];
      }
      error += (truth - approximate) * (truth - approximate);
      square += truth * truth;
      sum += truth;
      ++count;
    }
  }
  return (error / count) / (square / count - (sum / count) * (sum / count));
}

TEST(EncodeKeys, FlatSpectraLoseWhatTwoBitsADimensionLose) {
  Random random(prefixd::testing::Seed("FlatSpectraLoseWhatTwoBitsADimensionLose"));
  const uint32_t dim = 48, n = 4000;
  const TestRows rows(Normal(random, size_t{n} * dim), dim, DType::kF32);
  const auto encoded = EncodeKeys(rows.view());
  ASSERT_TRUE(encoded.ok());
  const double error = RelativeError(*encoded, rows, Normal(random, 20 * dim));
  // A uniform quantiser of four steps leaves 0.119 of a Gaussian.
  EXPECT_GT(error, 0.09);
  EXPECT_LT(error, 0.14);
}

TEST(EncodeKeys, BitsGoWhereTheKeysDiffer) {
  Random random(prefixd::testing::Seed("BitsGoWhereTheKeysDiffer"));
  const uint32_t dim = 64, n = 4000;
  std::vector<float> keys = Normal(random, size_t{n} * dim, 0.05f);
  for (uint32_t i = 0; i < n; ++i) {
    for (uint32_t d = 0; d < 8; ++d) keys[i * dim + d * 7] += 20 + 3 * Normal(random, 1)[0];
  }
  const TestRows rows(keys, dim, DType::kF32);
  const auto encoded = EncodeKeys(rows.view());
  ASSERT_TRUE(encoded.ok());
  EXPECT_LT(RelativeError(*encoded, rows, Normal(random, 20 * dim)), 0.002);
}

// Keys lie around 40 places: blocks hold those of one place, and the rest is small.
TEST(EncodeKeys, KeysThatAreAlikeShareABlock) {
  Random random(prefixd::testing::Seed("KeysThatAreAlikeShareABlock"));
  const uint32_t dim = 32, n = 3000;
  const std::vector<float> places = Normal(random, 40 * dim, 4);
  std::vector<float> keys = Normal(random, size_t{n} * dim, 0.2f);
  for (uint32_t i = 0; i < n; ++i) {
    const uint32_t place = Uniform(random, 0, 39);
    for (uint32_t d = 0; d < dim; ++d) keys[i * dim + d] += places[place * dim + d];
  }
  const TestRows rows(keys, dim, DType::kF32);
  const auto encoded = EncodeKeys(rows.view());
  ASSERT_TRUE(encoded.ok());
  EXPECT_LT(RelativeError(*encoded, rows, Normal(random, 20 * dim)), 0.07);
}

// A key's integer score with its block's bias is the score of the key that its code stands for.
TEST(BlockQueries, AgreeWithDecodedKeys) {
  Random random(prefixd::testing::Seed("AgreeWithDecodedKeys"));
  for (int round = 0; round < 12; ++round) {
    const uint32_t dim = Uniform(random, 3, 140), n = Uniform(random, 40, 2500), heads = 3;
    std::vector<float> keys = Normal(random, size_t{n} * dim);
    for (uint32_t i = 0; i < n; ++i) keys[i * dim + 1] += round % 3 == 0 ? 30 : 0;
    for (uint32_t i = 0; i < n; ++i) keys[i * dim] *= round % 2 == 0 ? 20 : 1;
    const TestRows rows(keys, dim, DType::kF32);
    const auto encoded = EncodeKeys(rows.view());
    ASSERT_TRUE(encoded.ok());
    const BlockCodes codes(dim, n, encoded->arrays.bytes());
    const std::vector<float> q = Normal(random, heads * dim);
    const float scale = round % 5 == 4 ? -0.2f : 0.2f;
    const auto queries = PrepareBlockQueries(encoded->book, q, heads, scale);
    ASSERT_TRUE(queries.ok());
    const CodeQueries& of_means = queries->means;
    const CodeQueries& of_keys = queries->keys;
    const size_t ld = codes.layout.n_windows * kCodeBlockKeys;
    std::vector<int16_t> means(heads * ld), scores(heads * kCodeBlockKeys);
    CodeScan().scan(codes.means, nullptr, codes.layout.n_windows,
                    {of_means.weights.data(), of_means.bias.data(), heads, of_means.fields},
                    means.data(), ld);
    std::vector<int16_t> bias(means.size());
    for (uint32_t g = 0; g < heads; ++g) {
      CodeScan().scaled(means.data() + g * ld, ld, queries->units_of_mean[g], bias.data() + g * ld);
    }
    std::vector<float> decoded(dim);
    for (uint32_t b = 0; b < codes.layout.n_blocks; ++b) {
      CodeScan().scan(
          codes.codes, &b, 1,
          {of_keys.weights.data(), of_keys.bias.data(), heads, of_keys.fields, bias.data(), ld},
          scores.data(), kCodeBlockKeys);
      for (size_t j = 0; j < kCodeBlockKeys; ++j) {
        const size_t place = size_t{b} * kCodeBlockKeys + j;
        if (codes.tokens[place] == kNoKey) continue;
        DecodeBlockKey(encoded->book, codes, place, decoded);
        for (uint32_t g = 0; g < heads; ++g) {
          double truth = 0, size = 0;
          for (uint32_t d = 0; d < dim; ++d) {
            truth += double{scale} * q[g * dim + d] * decoded[d];
            size += std::fabs(double{scale} * q[g * dim + d] * decoded[d]);
          }
          const int16_t v = scores[g * kCodeBlockKeys + j];
          ASSERT_GT(v, kNoScore);
          // Weights are off by at most half, digits at most 3, in both.
          const double rounding =
              1.5 * of_keys.fields * (double{of_keys.mul[g]} + of_means.mul[g]) + of_keys.mul[g];
          // Directions of means are not rounded to bf16 again: 2^-9 of them.
          EXPECT_NEAR(of_keys.mul[g] * double(v) + of_keys.add[g], truth,
                      rounding + 1e-4 * size + 0.004 * size);
        }
      }
    }
  }
}

TEST(BlockCodes, WhatIsDamagedIsRefused) {
  Random random(prefixd::testing::Seed("WhatIsDamagedIsRefused"));
  const uint32_t dim = 8, n = 1100;
  const TestRows rows(Normal(random, size_t{n} * dim), dim, DType::kF32);
  auto encoded = EncodeKeys(rows.view());
  ASSERT_TRUE(encoded.ok());
  const std::span<std::byte> arrays = encoded->arrays.bytes();
  const BlockCodes codes(dim, n, arrays);
  ASSERT_TRUE(codes.Validate().ok());
  const auto refused = [&](size_t at, uint16_t value) {
    auto* place = reinterpret_cast<uint16_t*>(arrays.data() + at);
    const uint16_t before = std::exchange(*place, value);
    const bool bad = !codes.Validate().ok();
    *place = before;
    return bad;
  };
  const BlockLayout& layout = codes.layout;
  EXPECT_TRUE(refused(layout.tokens, codes.tokens[1]));  // one twice, one missing
  EXPECT_TRUE(refused(layout.tokens + 2 * 1030, 76));    // beyond the last window
  EXPECT_TRUE(refused(layout.tokens + 2 * n, 3));        // a key more
  EXPECT_TRUE(codes.Validate().ok());
  BlockCodeBook book = encoded->book;
  book.mean_ratios[0] = -1;
  EXPECT_FALSE(book.Validate().ok());
  book = encoded->book;
  book.mean_digits[0] = 5;
  EXPECT_FALSE(book.Validate().ok());
  book = encoded->book;
  book.variances.pop_back();
  EXPECT_FALSE(book.Validate().ok());
}

TEST(EncodeKeys, EqualKeysNeedNoDigits) {
  const uint32_t dim = 16, n = 100;
  const TestRows rows(std::vector<float>(size_t{n} * dim, 1.5f), dim, DType::kBf16);
  const auto encoded = EncodeKeys(rows.view());
  ASSERT_TRUE(encoded.ok()) << encoded.error().ToString();
  std::vector<float> decoded(dim);
  DecodeBlockKey(encoded->book, BlockCodes(dim, n, encoded->arrays.bytes()), 7, decoded);
  for (const float x : decoded) EXPECT_NEAR(x, 1.5, 1e-5);
}

TEST(EncodeKeys, WhatIsNotFiniteIsRefusedByName) {
  Random random(1);
  std::vector<float> keys = Normal(random, 2000 * 4);
  keys[1234 * 4 + 1] = std::numeric_limits<float>::infinity();
  const TestRows rows(keys, 4, DType::kF32);
  auto encoded = EncodeKeys(rows.view());
  ASSERT_FALSE(encoded.ok());
  EXPECT_NE(encoded.error().message.find("row 1234"), std::string::npos);
}

}  // namespace
}  // namespace prefixd::index
