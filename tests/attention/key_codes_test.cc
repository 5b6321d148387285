// Codes and their scan: layout, linearity, and that every instruction set returns the same
// integers.
#include "attention/key_codes.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <iterator>
#include <limits>
#include <random>

#include "attention/code_scan.h"
#include "attention/kv_shape.h"
#include "attention/top_ranks.h"
#include "tests/support/seed.h"
#include "tests/support/test.h"

namespace prefixd {
namespace {

using Random = std::mt19937_64;

CodeBook RandomBook(Random& random, uint32_t dim) {
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
  Codes(Random& random, const CodeBook& book, size_t n)
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
  Random random(testing::Seed("ACodeDecodesToItsCoordinates"));
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

// The integer score, in plain arithmetic.
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
  Random random(testing::Seed("EveryTableReturnsTheSameIntegers"));
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
  Random random(testing::Seed("SomeBlocksWithTheirOwnBias"));
  std::normal_distribution<float> normal;
  for (int round = 0; round < 60; ++round) {
    const uint32_t dim = 1 + static_cast<uint32_t>(random() % 140);
    const auto heads = static_cast<uint32_t>(1 + random() % 7);
    const CodeBook book = RandomBook(random, dim);
    const size_t n = 1 + random() % 900, blocks = CodeBlocks(n);
    const Codes codes(random, book, n);
    std::vector<float> q(heads * dim);
    for (float& x : q) x = normal(random);
    // Room for what the bias adds.
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
  Random random(testing::Seed("TheIntegerScoreIsTheScoreOfTheDecodedKey"));
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

TEST(CodeScan, SumsAndCollectionAgreeWithPlainLoops) {
  Random random(testing::Seed("SumsAndCollectionAgreeWithPlainLoops"));
  for (const auto isa : {CodeScanIsa::kGeneric, CodeScanIsa::kAvx2, CodeScanIsa::kAvx512Vnni}) {
    const CodeScanTable* table = CodeScanFor(isa);
    if (!table) continue;
    for (const size_t n :
         {size_t{0}, size_t{1}, size_t{15}, size_t{16}, size_t{97}, size_t{3000}}) {
      const size_t heads = 3, ld = n + 5;
      std::vector<int16_t> v(heads * ld);
      for (int16_t& x : v) x = static_cast<int16_t>(random());
      for (const float mul : {0.0f, 1e-5f, 2e-4f, 6e-4f, 1.3e-3f, 3e-3f, 0.02f, 0.3f, 40.0f}) {
        for (const int16_t top : {int16_t{32767}, int16_t{12000}}) {
          double sum = 0, error = 0;
          std::vector<int16_t> below(v.begin(), v.begin() + static_cast<ptrdiff_t>(n));
          for (int16_t& x : below) {
            x = std::min(x, top);
            const double w = std::exp(std::min(0.69, double{mul}) * (x - top));
            sum += w;
            error += std::max(1e-3, std::expm1(std::min(1.0, double{mul}))) * w +
                     0x1p-15 * std::sqrt(w) + 0x1p-30;
          }
          EXPECT_NEAR(table->weight_sum(below.data(), n, top, mul), sum, error)
              << table->name << " " << mul;
        }
      }
      std::vector<float> floats(n);
      double sum = 0;
      for (size_t i = 0; i < n; ++i) {
        floats[i] = 3e-3f * float(v[i]);
        sum += std::exp(std::max(-80.0f, floats[i] - 60));
      }
      EXPECT_NEAR(table->exp_total(floats.data(), n, -60), sum, 1e-3 * sum + 1e-30);
      if (n > 0) {
        EXPECT_EQ(table->largest(v.data(), n), *std::max_element(v.begin(), v.begin() + n));
      }
      for (const int16_t floor : {-32768, -20000, 0, 32000, 32767}) {
        const int16_t floors[] = {floor, 32600, static_cast<int16_t>(floor / 2 + 16383)};
        std::vector<uint32_t> found(n + 1, 7), truth;
        for (size_t i = 0; i < n; ++i) {
          bool hit = false;
          for (size_t g = 0; g < heads; ++g) hit |= v[g * ld + i] > floors[g];
          if (hit) truth.push_back(100 + static_cast<uint32_t>(i));
        }
        const size_t count = table->above(v.data(), ld, heads, floors, n, 100, found.data());
        EXPECT_EQ(found[n], 7u);  // no further than there is room
        found.resize(count);
        EXPECT_EQ(found, truth) << table->name;
      }
    }
  }
}

// Searches are the same to the bit on every machine: so is what their ranks are made of.
TEST(CodeScan, EveryTableReturnsTheSameFloats) {
  Random random(testing::Seed("EveryTableReturnsTheSameFloats"));
  std::normal_distribution<float> normal;
  const CodeScanTable& plain = *CodeScanFor(CodeScanIsa::kGeneric);
  for (const auto isa : {CodeScanIsa::kAvx2, CodeScanIsa::kAvx512Vnni}) {
    const CodeScanTable* table = CodeScanFor(isa);
    if (!table) continue;
    for (int round = 0; round < 60; ++round) {
      const size_t n = round < 40 ? 1 + random() % 70 : 1 + random() % 5000;
      std::vector<int16_t> v(n);
      std::vector<uint16_t> spreads(n);
      std::vector<float> x(n), y(n);
      std::vector<uint32_t> at(n);
      for (size_t i = 0; i < n; ++i) {
        v[i] = static_cast<int16_t>(random());
        spreads[i] = FloatToBf16(std::fabs(normal(random)));
        x[i] = random() % 20 == 0 ? -std::numeric_limits<float>::infinity() : normal(random);
        y[i] = x[i];
        at[i] = static_cast<uint32_t>(random() % n);
      }
      const float mul = 1e-3f * std::fabs(normal(random)), add = normal(random);
      const int16_t top = *std::max_element(v.begin(), v.end());
      const float unit = round % 10 == 0 ? 3.0f : mul;
      EXPECT_EQ(table->weight_sum(v.data(), n, top, unit),
                plain.weight_sum(v.data(), n, top, unit));
      EXPECT_EQ(table->exp_total(x.data(), n, add), plain.exp_total(x.data(), n, add));
      table->raise(v.data(), n, mul, add, x.data());
      plain.raise(v.data(), n, mul, add, y.data());
      EXPECT_EQ(x, y);
      std::vector<float> mass(n), high(n), true_mass(n), true_high(n);
      const BlockTerms terms{mul, add, std::fabs(normal(random))};
      table->block_scores(v.data(), spreads.data(), n, terms, mass.data(), high.data());
      plain.block_scores(v.data(), spreads.data(), n, terms, true_mass.data(), true_high.data());
      EXPECT_EQ(mass, true_mass);
      EXPECT_EQ(high, true_high);
      std::vector<int16_t> out(n), truth(n);
      table->pick(v.data(), at.data(), n, out.data());
      plain.pick(v.data(), at.data(), n, truth.data());
      EXPECT_EQ(out, truth);
      const float units = 0.999f * std::uniform_real_distribution<float>(-1, 1)(random);
      table->scaled(v.data(), n, units, out.data());
      plain.scaled(v.data(), n, units, truth.data());
      EXPECT_EQ(out, truth);
    }
  }
}

TEST(CodeScan, RanksAndBiasesAgreeWithPlainLoops) {
  Random random(testing::Seed("RanksAndBiasesAgreeWithPlainLoops"));
  std::normal_distribution<float> normal;
  for (const auto isa : {CodeScanIsa::kGeneric, CodeScanIsa::kAvx2, CodeScanIsa::kAvx512Vnni}) {
    const CodeScanTable* table = CodeScanFor(isa);
    if (!table) continue;
    for (const size_t n : {size_t{1}, size_t{15}, size_t{64}, size_t{97}, size_t{3000}}) {
      std::vector<int16_t> v(n), out(n);
      std::vector<uint16_t> spreads(n);
      std::vector<float> x(n);
      for (size_t i = 0; i < n; ++i) {
        v[i] = static_cast<int16_t>(random());
        spreads[i] = FloatToBf16(4 * std::fabs(normal(random)));
        x[i] = static_cast<float>(static_cast<int>(random() % 7)) - 3;
      }
      EXPECT_EQ(table->largest_float(x.data(), n), *std::max_element(x.begin(), x.end()));
      for (const float floor : {-4.0f, -1.0f, 0.5f, 3.0f, 4.0f}) {
        std::vector<uint32_t> found(n + 1, 7), truth;
        for (uint32_t i = 0; i < n; ++i) {
          if (x[i] >= floor) truth.push_back(i);
        }
        EXPECT_EQ(table->count_from(x.data(), n, floor), truth.size());
        for (const float high : {floor + 2, std::numeric_limits<float>::quiet_NaN()}) {
          std::vector<float> some(n + 1, 7), wanted;
          std::ranges::copy_if(x, std::back_inserter(wanted),
                               [&](float value) { return value >= floor && !(value >= high); });
          const size_t count = table->between(x.data(), n, floor, high, some.data());
          EXPECT_EQ(some[n], 7);  // no further than there is room
          some.resize(count);
          EXPECT_EQ(some, wanted) << table->name;
          std::vector<float> same = x;
          same.resize(table->between(same.data(), n, floor, high, same.data()));
          EXPECT_EQ(same, wanted) << table->name;
        }
        found.resize(table->places_from(x.data(), n, floor, found.data()));
        EXPECT_EQ(found, truth) << table->name;
      }
      table->scaled(v.data(), n, 0.37f, out.data());
      std::vector<float> mass(n), high(n);
      table->block_scores(v.data(), spreads.data(), n, {1e-3f, 2, 0.7f}, mass.data(), high.data());
      std::vector<float> rank = x;
      table->raise(v.data(), n, 1e-4f, 0.5f, rank.data());
      for (size_t i = 0; i < n; ++i) {
        EXPECT_NEAR(out[i], 0.37 * v[i], 0.51);
        const double mean = 1e-3 * v[i] + 2, sd = 0.7 * Bf16ToFloat(spreads[i]);
        EXPECT_NEAR(high[i], mean + kReach * sd, 1e-4);
        EXPECT_NEAR(mass[i], mean + std::min(sd * sd / 2, kMostTail * sd), 1e-4);
        EXPECT_NEAR(rank[i], std::max(double{x[i]}, 1e-4 * v[i] + 0.5), 1e-5);
      }
    }
  }
}

TEST(TopRanks, KthLargestIsWhatSortingFinds) {
  Random random(testing::Seed("KthLargestIsWhatSortingFinds"));
  std::normal_distribution<float> normal;
  std::vector<float> scratch;
  for (int round = 0; round < 60; ++round) {
    const size_t n = 1 + random() % (round % 4 == 0 ? 30000 : round % 4 == 1 ? 3000 : 300);
    const float mean = round % 7 == 0 ? -30.0f : 0.0f;  // as normalised scores are
    std::vector<float> x(n);
    for (float& value : x) {
      value = random() % 9 == 0 ? -std::numeric_limits<float>::infinity() : mean + normal(random);
      if (round % 3 == 0) value = std::round(value);
      if (round % 5 == 0 && random() % 50 == 0) value = std::numeric_limits<float>::infinity();
      if (round % 11 == 0) value = std::copysign(0.0f, value);
    }
    std::vector<float> sorted = x;
    std::sort(sorted.begin(), sorted.end(), std::greater<>());
    for (const size_t k : {size_t{1}, n / 100 + 1, n / 2 + 1, n}) {
      EXPECT_EQ(KthLargest(x, k, scratch), sorted[k - 1]) << k << " of " << n;
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
