#include "index/code_training.h"

#include "index/symmetric_eigen.h"
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

// Mean squared error of scores of decoded keys, over the variance of the scores.
double RelativeError(const KeyEncoder& encoder, const TestRows& rows,
                     std::span<const float> queries) {
  const uint32_t dim = rows.shape.key_dim;
  const size_t n = rows.count;
  std::vector<std::byte> codes(CodeBlocks(n) * CodeBlockBytes(dim));
  EXPECT_TRUE(encoder.Encode(rows.view(), codes).ok());
  std::vector<float> decoded(dim);
  double error = 0, square = 0, sum = 0, count = 0;
  for (size_t i = 0; i < n; ++i) {
    DecodeKey(encoder.book(), codes, i, decoded);
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

TEST(KeyEncoder, FlatSpectraLoseWhatTwoBitsADimensionLose) {
  Random random(prefixd::testing::Seed("FlatSpectraLoseWhatTwoBitsADimensionLose"));
  const uint32_t dim = 48, n = 4000;
  const TestRows rows(Normal(random, size_t{n} * dim), dim, DType::kF32);
  const auto encoder = KeyEncoder::Train(rows.view(), {});
  ASSERT_TRUE(encoder.ok());
  const double error = RelativeError(*encoder, rows, Normal(random, 20 * dim));
  // Of a Gaussian a uniform quantiser of four steps leaves 0.119.
  EXPECT_GT(error, 0.09);
  EXPECT_LT(error, 0.14);
}

TEST(KeyEncoder, BitsGoWhereTheKeysDiffer) {
  Random random(prefixd::testing::Seed("BitsGoWhereTheKeysDiffer"));
  const uint32_t dim = 64, n = 4000;
  std::vector<float> keys = Normal(random, size_t{n} * dim, 0.05f);
  for (uint32_t i = 0; i < n; ++i) {
    for (uint32_t d = 0; d < 8; ++d) keys[i * dim + d * 7] += 20 + 3 * Normal(random, 1)[0];
  }
  const TestRows rows(keys, dim, DType::kF32);
  const auto encoder = KeyEncoder::Train(rows.view(), {});
  ASSERT_TRUE(encoder.ok());
  EXPECT_LT(RelativeError(*encoder, rows, Normal(random, 20 * dim)), 0.002);
}

TEST(KeyEncoder, SampledQueriesSayWhichErrorsMatter) {
  Random random(prefixd::testing::Seed("SampledQueriesSayWhichErrorsMatter"));
  const uint32_t dim = 32, n = 4000;
  const TestRows rows(Normal(random, size_t{n} * dim), dim, DType::kF32);
  std::vector<float> queries = Normal(random, 200 * dim, 0.1f);
  for (size_t q = 0; q < 200; ++q) {
    for (uint32_t d = 0; d < 2; ++d) queries[q * dim + d] *= 30;
  }
  const auto with = KeyEncoder::Train(rows.view(), queries);
  const auto without = KeyEncoder::Train(rows.view(), {});
  ASSERT_TRUE(with.ok() && without.ok());
  EXPECT_LT(RelativeError(*with, rows, queries), 0.5 * RelativeError(*without, rows, queries));
}

TEST(KeyEncoder, EqualKeysNeedNoDigits) {
  const uint32_t dim = 16, n = 100;
  const TestRows rows(std::vector<float>(size_t{n} * dim, 1.5f), dim, DType::kBf16);
  const auto encoder = KeyEncoder::Train(rows.view(), {});
  ASSERT_TRUE(encoder.ok()) << encoder.error().ToString();
  std::vector<std::byte> codes(CodeBlocks(n) * CodeBlockBytes(dim));
  ASSERT_TRUE(encoder->Encode(rows.view(), codes).ok());
  std::vector<float> decoded(dim);
  DecodeKey(encoder->book(), codes, 7, decoded);
  for (const float x : decoded) EXPECT_NEAR(x, 1.5, 1e-5);
}

TEST(KeyEncoder, WhatIsNotFiniteIsRefusedByName) {
  Random random(1);
  std::vector<float> keys = Normal(random, 2000 * 4);
  keys[1234 * 4 + 1] = std::numeric_limits<float>::infinity();
  const TestRows rows(keys, 4, DType::kF32);
  auto encoder = KeyEncoder::Train(rows.view(), {});
  ASSERT_FALSE(encoder.ok());
  EXPECT_NE(encoder.error().message.find("row 1234"), std::string::npos);
  const TestRows good(Normal(random, 2000 * 4), 4, DType::kF32);
  std::vector<float> queries(40, 1.0f);
  queries[9] = std::numeric_limits<float>::quiet_NaN();
  encoder = KeyEncoder::Train(good.view(), queries);
  ASSERT_FALSE(encoder.ok());
  EXPECT_NE(encoder.error().message.find("query 2"), std::string::npos);
}

}  // namespace
}  // namespace prefixd::index
