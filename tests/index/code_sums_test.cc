// Tests how a search uses a scan's integers: sums, collections, ranks.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <iterator>
#include <limits>
#include <random>

#include "index/codes/code_scan.h"
#include "index/ranking/top_ranks.h"
#include "tests/support/seed.h"
#include "tests/support/test.h"

namespace prefixd {
namespace {

using Generator = std::mt19937_64;

TEST(CodeScan, SumsAndCollectionAgreeWithPlainLoops) {
  Generator random(testing::Seed("SumsAndCollectionAgreeWithPlainLoops"));
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
            // Weights beyond ln 2 count as ln 2; there integers count as the next ones, times the
            // root of two.
            const double per_unit = std::min(std::log(2.0), double{mul});
            const double w = std::exp(per_unit * (x - top));
            sum += w;
            error += std::max(2e-3, std::min(0.42, std::expm1(per_unit))) * w +
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
        EXPECT_EQ(found[n], 7u);  // nothing is written beyond the room
        found.resize(count);
        EXPECT_EQ(found, truth) << table->name;
      }
    }
  }
}

// Searches are the same to the bit on every machine, and so are the floats that their ranks come
// from.
TEST(CodeScan, EveryTableReturnsTheSameFloats) {
  Generator random(testing::Seed("EveryTableReturnsTheSameFloats"));
  std::normal_distribution<float> normal;
  const CodeScanTable& plain = *CodeScanFor(CodeScanIsa::kGeneric);
  for (const auto isa : {CodeScanIsa::kAvx2, CodeScanIsa::kAvx512Vnni}) {
    const CodeScanTable* table = CodeScanFor(isa);
    if (!table) continue;
    for (int round = 0; round < 60; ++round) {
      const size_t n = round < 40 ? 1 + random() % 70 : 1 + random() % 5000;
      std::vector<int16_t> v(n);
      std::vector<float> x(n), y(n);
      std::vector<uint32_t> at(n);
      for (size_t i = 0; i < n; ++i) {
        v[i] = static_cast<int16_t>(random());
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
  Generator random(testing::Seed("RanksAndBiasesAgreeWithPlainLoops"));
  std::normal_distribution<float> normal;
  for (const auto isa : {CodeScanIsa::kGeneric, CodeScanIsa::kAvx2, CodeScanIsa::kAvx512Vnni}) {
    const CodeScanTable* table = CodeScanFor(isa);
    if (!table) continue;
    for (const size_t n : {size_t{1}, size_t{15}, size_t{64}, size_t{97}, size_t{3000}}) {
      std::vector<int16_t> v(n), out(n);
      std::vector<float> x(n);
      for (size_t i = 0; i < n; ++i) {
        v[i] = static_cast<int16_t>(random());
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
          EXPECT_EQ(some[n], 7);  // nothing is written beyond the room
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
      std::vector<float> rank = x;
      table->raise(v.data(), n, 1e-4f, 0.5f, rank.data());
      for (size_t i = 0; i < n; ++i) {
        EXPECT_NEAR(out[i], 0.37 * v[i], 0.51);
        EXPECT_NEAR(rank[i], std::max(double{x[i]}, 1e-4 * v[i] + 0.5), 1e-5);
      }
    }
  }
}

TEST(TopRanks, KthLargestIsWhatSortingFinds) {
  Generator random(testing::Seed("KthLargestIsWhatSortingFinds"));
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

TEST(TopRanks, NegativeZerosAtTheTopAreFound) {
  std::vector<float> x(1000), scratch;
  for (size_t i = 0; i < x.size(); ++i) x[i] = i < 4 ? -0.0f : -static_cast<float>(i);
  for (size_t k = 1; k <= 6; ++k) {
    EXPECT_EQ(KthLargest(x, k, scratch), k <= 4 ? 0.0f : -static_cast<float>(k - 1)) << k;
  }
}

}  // namespace
}  // namespace prefixd
