// Tests codes and their scan: layout, linearity, and that every instruction set returns the same
// integers.
#include "index/codes/key_codes.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "attention/rows/rows.h"
#include "index/codes/code_scan.h"
#include "tests/support/seed.h"
#include "tests/support/test.h"

namespace prefixd {
namespace {

using Generator = std::mt19937_64;

CodeBook RandomBook(Generator& random, uint32_t dim) {
  std::normal_distribution<float> normal;
  CodeBook book;
  book.key_dim = dim;
  for (uint32_t d = 0; d < dim; ++d) book.centre.push_back(normal(random));
  uint32_t left = CodeFields(dim);
  while (left > 0 && book.components() < dim && random() % 50 != 0) {
    const auto digits = static_cast<uint8_t>(1 + random() % std::min(left, kMaxCodeDigits));
    book.digits.push_back(digits);
    left -= digits;
    for (uint32_t d = 0; d < dim; ++d) {
      book.directions.push_back(FloatToBf16(normal(random) / float(1u << 2 * digits)));
    }
  }
  return book;
}

struct Codes {
  Codes(Generator& random, const CodeBook& book, size_t n)
      : bytes(CodeBlocks(n) * CodeBlockBytes(book.key_dim)), coordinates(n * book.components()) {
    for (size_t i = 0; i < n; ++i) {
      for (size_t c = 0; c < book.components(); ++c) {
        coordinates[i * book.components() + c] =
            static_cast<uint8_t>(random() % (1u << 2 * book.digits[c]));
      }
      PackCode(book, std::span(coordinates).subspan(i * book.components(), book.components()), i,
               bytes);
    }
  }
  std::vector<std::byte> bytes;
  std::vector<uint8_t> coordinates;
};

TEST(KeyCodes, EveryFieldHasItsOwnBits) {
  for (const uint32_t dim : {1u, 16u, 17u, 64u, 128u, 200u}) {
    const size_t n = 70;
    std::vector<uint8_t> used(CodeBlocks(n) * CodeBlockBytes(dim));
    for (size_t key = 0; key < CodeBlocks(n) * kCodeBlockKeys; ++key) {
      for (uint32_t field = 0; field < CodeFields(dim); ++field) {
        const CodePlace place = PlaceOfCode(dim, key, field);
        ASSERT_LT(place.byte, used.size());
        EXPECT_EQ(used[place.byte] >> place.shift & 3, 0);
        used[place.byte] = static_cast<uint8_t>(used[place.byte] | 3u << place.shift);
      }
    }
    for (const uint8_t byte : used) EXPECT_EQ(byte, 255);
  }
}

TEST(KeyCodes, ACodeDecodesToItsCoordinates) {
  Generator random(testing::Seed("ACodeDecodesToItsCoordinates"));
  for (int round = 0; round < 40; ++round) {
    const uint32_t dim = 1 + static_cast<uint32_t>(random() % 150);
    const CodeBook book = RandomBook(random, dim);
    ASSERT_TRUE(book.Validate().ok());
    const size_t n = 1 + random() % 80;
    const Codes codes(random, book, n);
    std::vector<float> decoded(dim);
    for (size_t i = 0; i < n; ++i) {
      DecodeKey(book, codes.bytes, i, decoded);
      for (uint32_t d = 0; d < dim; ++d) {
        double truth = book.centre[d], size = std::fabs(truth);
        for (size_t c = 0; c < book.components(); ++c) {
          const double term = double(codes.coordinates[i * book.components() + c]) *
                              Bf16ToFloat(book.directions[c * dim + d]);
          truth += term;
          size += std::fabs(term);
        }
        EXPECT_NEAR(decoded[d], truth, 1e-5 * size);
      }
    }
  }
}

// Returns the integer score, in plain arithmetic.
int32_t TrueScan(const CodeBook& book, const CodeQueries& queries, std::span<const std::byte> codes,
                 size_t head, size_t key) {
  int32_t sum = queries.bias[head];
  for (uint32_t p = 0; p < queries.fields; ++p) {
    const CodePlace place = PlaceOfCode(book.key_dim, key, p);
    sum += queries.weights[head * queries.fields + p] *
           (std::to_integer<int32_t>(codes[place.byte]) >> place.shift & 3);
  }
  return sum;
}

TEST(CodeScan, EveryTableReturnsTheSameIntegers) {
  Generator random(testing::Seed("EveryTableReturnsTheSameIntegers"));
  std::normal_distribution<float> normal;
  for (int round = 0; round < 60; ++round) {
    const uint32_t dim = round % 7 == 0 ? 1024 : 1 + static_cast<uint32_t>(random() % 260);
    const auto heads = static_cast<uint32_t>(1 + random() % 9);
    const CodeBook book = RandomBook(random, dim);
    const size_t n = 1 + random() % (dim > 300 ? 100 : 600), blocks = CodeBlocks(n);
    const Codes codes(random, book, n);
    std::vector<float> q(heads * dim);
    for (float& x : q) x = normal(random);
    CodeQueries queries = PrepareCodeQueries(book, q, heads, 0.3f);
    if (round % 3 == 0) {  // weights at their limits: only the sums' range is promised
      for (uint32_t g = 0; g < heads; ++g) {
        int32_t sum = 0;
        for (uint32_t p = 0; p < queries.fields; ++p) {
          const bool fits = p < 128 / 4 * 4 && p < 160;
          const auto w = static_cast<int8_t>(fits ? (g % 2 == 0 ? 127 : -127) : 0);
          queries.weights[g * queries.fields + p] = w;
          sum += w;
        }
        queries.bias[g] = -3 * sum / 2;
      }
    }
    const size_t ld = blocks * kCodeBlockKeys + random() % 40;
    const CodeScanQuery query{queries.weights.data(), queries.bias.data(), heads, queries.fields};
    for (const auto isa : {CodeScanIsa::kGeneric, CodeScanIsa::kAvx2, CodeScanIsa::kAvx512Vnni}) {
      const CodeScanTable* table = CodeScanFor(isa);
      if (!table) continue;
      std::vector<int16_t> out(heads * ld, 12345);
      table->scan(codes.bytes.data(), nullptr, blocks, query, out.data(), ld);
      for (uint32_t g = 0; g < heads; ++g) {
        for (size_t i = 0; i < blocks * kCodeBlockKeys; ++i) {
          ASSERT_EQ(int32_t{out[g * ld + i]}, TrueScan(book, queries, codes.bytes, g, i))
              << table->name << " head " << g << " key " << i << " dim " << dim;
        }
      }
    }
  }
}

TEST(CodeScan, SomeBlocksWithTheirOwnBias) {
  Generator random(testing::Seed("SomeBlocksWithTheirOwnBias"));
  std::normal_distribution<float> normal;
  for (int round = 0; round < 60; ++round) {
    const uint32_t dim = 1 + static_cast<uint32_t>(random() % 140);
    const auto heads = static_cast<uint32_t>(1 + random() % 7);
    const CodeBook book = RandomBook(random, dim);
    const size_t n = 1 + random() % 900, blocks = CodeBlocks(n);
    const Codes codes(random, book, n);
    std::vector<float> q(heads * dim);
    for (float& x : q) x = normal(random);
    // The queries keep room for the terms that the bias adds.
    const std::vector<double> reserved(heads, 3e5);
    const CodeQueries queries = QuantiseQueries(ProjectOnDirections(book, q, heads), book.digits,
                                                heads, CodeFields(dim), 1, reserved);
    std::vector<uint32_t> which;
    for (uint32_t b = 0; b < blocks; ++b) {
      if (random() % 3 != 0) which.push_back(b);
    }
    const size_t ld_bias = blocks + random() % 5;
    std::vector<int16_t> bias(heads * ld_bias);
    for (int16_t& b : bias) b = static_cast<int16_t>(random() % 9 - 4);
    const size_t ld = which.size() * kCodeBlockKeys + random() % 40;
    for (const auto isa : {CodeScanIsa::kGeneric, CodeScanIsa::kAvx2, CodeScanIsa::kAvx512Vnni}) {
      const CodeScanTable* table = CodeScanFor(isa);
      if (!table) continue;
      std::vector<int16_t> out(heads * ld, 12345);
      table->scan(codes.bytes.data(), which.data(), which.size(),
                  {queries.weights.data(), queries.bias.data(), heads, queries.fields, bias.data(),
                   ld_bias},
                  out.data(), ld);
      for (uint32_t g = 0; g < heads; ++g) {
        for (size_t i = 0; i < which.size() * kCodeBlockKeys; ++i) {
          const size_t j = i / kCodeBlockKeys;
          const size_t key = size_t{which[j]} * kCodeBlockKeys + i % kCodeBlockKeys;
          const int32_t plain = TrueScan(book, queries, codes.bytes, g, key);
          ASSERT_EQ(int32_t{out[g * ld + i]}, plain + bias[g * ld_bias + which[j]])
              << table->name << " head " << g << " key " << key;
        }
      }
    }
  }
}

TEST(CodeScan, TheIntegerScoreIsTheScoreOfTheDecodedKey) {
  Generator random(testing::Seed("TheIntegerScoreIsTheScoreOfTheDecodedKey"));
  std::normal_distribution<float> normal;
  for (int round = 0; round < 40; ++round) {
    const uint32_t dim = 1 + static_cast<uint32_t>(random() % 200), heads = 3;
    const CodeBook book = RandomBook(random, dim);
    const Codes codes(random, book, 64);
    std::vector<float> q(heads * dim), decoded(dim);
    for (float& x : q) x = normal(random);
    const float scale = round % 4 == 0 ? -0.1f : 0.1f;
    const CodeQueries queries = PrepareCodeQueries(book, q, heads, scale);
    for (size_t i = 0; i < 64; ++i) {
      DecodeKey(book, codes.bytes, i, decoded);
      for (uint32_t g = 0; g < heads; ++g) {
        double truth = 0, size = 0;
        for (uint32_t d = 0; d < dim; ++d) {
          truth += double{scale} * q[g * dim + d] * decoded[d];
          size += std::fabs(double{scale} * q[g * dim + d] * decoded[d]);
        }
        const int32_t v = TrueScan(book, queries, codes.bytes, g, i);
        ASSERT_TRUE(v >= -32767 && v <= 32767);
        ASSERT_GE(queries.mul[g], 0);
        // Weights are off by at most half, digits at most 3.
        const double rounding = 0.5 * 3 * queries.fields * queries.mul[g];
        EXPECT_NEAR(queries.mul[g] * double(v) + queries.add[g], truth, rounding + 1e-5 * size);
      }
    }
  }
}

TEST(CodeBook, WhatDoesNotFitIsRefused) {
  CodeBook book{2, {0, 0}, {1, 4}, {0x3f80, 0, 0, 0x3f80}};
  EXPECT_TRUE(book.Validate().ok());
  CodeBook none = book;
  none.digits[0] = 0;  // a direction that only means use
  EXPECT_TRUE(none.Validate().ok());
  const auto refused = [](const CodeBook& bad) { return !bad.Validate().ok(); };
  CodeBook bad = book;
  bad.digits[0] = 5;
  EXPECT_TRUE(refused(bad));
  bad = book;
  bad.directions.pop_back();
  EXPECT_TRUE(refused(bad));
  bad = book;
  bad.centre[1] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_TRUE(refused(bad));
  bad = book;
  bad.directions[2] = FloatToBf16(std::numeric_limits<float>::infinity());
  EXPECT_TRUE(refused(bad));
  bad = {1, {0}, {4, 4}, {1, 1}};  // more components than dimensions
  EXPECT_TRUE(refused(bad));
  bad = {0, {}, {}, {}};
  EXPECT_TRUE(refused(bad));
}

TEST(CodeBook, ZeroQueriesAndEmptyBooksScoreTheCentre) {
  const CodeBook empty{3, {1, 2, 3}, {}, {}};
  ASSERT_TRUE(empty.Validate().ok());
  const std::vector<float> q = {1, 1, 1, 0, 0, 0};
  const CodeQueries queries = PrepareCodeQueries(empty, q, 2, 0.5f);
  EXPECT_NEAR(queries.add[0], 3, 1e-6);
  EXPECT_EQ(queries.add[1], 0);
  EXPECT_EQ(queries.bias[0], 0);
}

}  // namespace
}  // namespace prefixd
