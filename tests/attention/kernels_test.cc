// Tests every instruction set's kernels against plain float64 loops.
#include "attention/kernels/kernels.h"
#include "attention/rows/row_blocks.h"

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <limits>
#include <memory>
#include <vector>

#include "tests/support/infinity.h"
#include "tests/support/random_kv.h"
#include "tests/support/seed.h"
#include "tests/support/test.h"

namespace prefixd {
namespace {

using testing::OwnedRows;
using testing::Random;

std::vector<const KernelTable*> Tables() {
  std::vector<const KernelTable*> tables;
  for (Isa isa : kAllIsas) {
    if (const KernelTable* table = KernelsFor(isa)) tables.push_back(table);
  }
  return tables;
}

VectorBlock KeysOf(const RowsView& rows) { return KeyBlockAhead(rows, 0, rows.count); }

// Holds the same rows, each in its own memory that ends where the row does (which the address
// sanitizer watches), at any address: kernels must not depend on a stride.
struct Scattered {
  explicit Scattered(const RowsView& rows) : shape(rows.shape) {
    const auto own = [&](const std::byte* from, size_t bytes, size_t i) {
      const size_t off = i % 5 * 2;
      memory.emplace_back(new std::byte[off + bytes]);
      std::memcpy(memory.back().get() + off, from, bytes);
      return memory.back().get() + off;
    };
    for (size_t i = 0; i < rows.count; ++i) {
      refs.push_back(
          {own(rows.key(i), shape.key_bytes(), i), own(rows.value(i), shape.value_bytes(), i)});
    }
  }
  RowsView view() const { return ScatteredRows(refs, shape); }
  std::vector<std::unique_ptr<std::byte[]>> memory;
  std::vector<RowRef> refs;
  RowShape shape;
};

// Returns mostly any dimension, at times one where loops end or kernels change.
uint32_t AnyDim(Random& random) {
  constexpr uint32_t kEdges[] = {16, 32, 33, 80, 96, 256, 257, 512, 1024, 1040};
  return random.Chance(0.2) ? kEdges[random.Int(0, std::size(kEdges) - 1)] : random.Int(1, 270);
}

TEST(Kernels, ChosenTableIsTheWidestThisMachineHas) {
  if (std::getenv("PREFIXD_TEST_KERNELS") != nullptr) return;  // these kernels are given
  EXPECT_EQ(&Kernels(), Tables().back());
}

TEST(Kernels, DotMatchesFloat64) {
  Random random(testing::Seed("Kernels.Dot"));
  for (int round = 0; round < 300; ++round) {
    const uint32_t dim = AnyDim(random);
    const size_t n = random.Int(0, 90), heads = random.Int(1, 21);
    const OwnedRows rows =
        testing::RandomRows(random, {dim, random.Int(1, 8), random.AnyDType()}, n);
    const Scattered scattered(rows.view());
    const RowsView view = random.Chance(0.5) ? rows.view() : scattered.view();
    std::vector<float> q(heads * PadUp(dim));
    for (size_t g = 0; g < heads; ++g) {
      for (uint32_t j = 0; j < dim; ++j) q[g * PadUp(dim) + j] = random.Normal();
    }
    for (const KernelTable* table : Tables()) {
      SCOPED_TRACE(table->name);
      const size_t ld = n + random.Int(0, 3);
      std::vector<float> out(heads * ld + 1, -77.0f);
      table->dot(q.data(), PadUp(dim), heads, KeysOf(view), 0.25f, out.data(), ld);
      for (size_t i = 0; i < n; ++i) {
        const std::vector<float> key = rows.Key(i);
        for (size_t g = 0; g < heads; ++g) {
          double dot = 0, size = 0;
          for (uint32_t j = 0; j < dim; ++j) {
            const double term = 0.25 * q[g * PadUp(dim) + j] * key[j];
            dot += term;
            size += std::abs(term);
          }
          ASSERT_NEAR(out[g * ld + i], dot, 1e-6 * size + 1e-30) << "head " << g << " row " << i;
        }
      }
      for (size_t at = n; ld > n && at < ld; ++at) ASSERT_EQ(out[at], -77.0f) << "overrun";
    }
  }
}

TEST(Kernels, ScoreKeepsNothingOfTermsThatCancel) {
  Random random(testing::Seed("Kernels.Score"));
  for (int round = 0; round < 300; ++round) {
    const uint32_t dim = AnyDim(random);
    const size_t n = random.Int(0, 40), heads = random.Int(1, 21);
    OwnedRows rows({dim, 1, random.AnyDType()}, n, random.Int(0, 5));
    for (size_t i = 0; i < n; ++i) {
      std::vector<float> key = random.Normals(dim, 1000);
      for (uint32_t j = 0; j + 1 < dim; j += 2) key[j + 1] = -key[j];
      rows.Set(i, key, random.Normals(1));
    }
    const Scattered scattered(rows.view());
    const RowsView view = random.Chance(0.5) ? rows.view() : scattered.view();
    const size_t ldq = PadUp(dim), ld = n + random.Int(0, 3);
    std::vector<double> q(heads * ldq);
    for (size_t g = 0; g < heads; ++g) {
      for (uint32_t j = 0; j < dim; ++j) {
        q[g * ldq + j] = j % 2 ? double{static_cast<float>(q[g * ldq + j - 1] * (1 + 1e-5))}
                               : double{random.Normal()};
      }
    }
    for (const KernelTable* table : Tables()) {
      SCOPED_TRACE(table->name);
      std::vector<float> out(heads * ld + 1, -77.0f);
      table->score(q.data(), ldq, heads, KeysOf(view), 0.25, out.data(), ld);
      for (size_t i = 0; i < n; ++i) {
        const std::vector<float> key = rows.Key(i);
        for (size_t g = 0; g < heads; ++g) {
          double dot = 0, size = 0;
          for (uint32_t j = 0; j < dim; ++j) {
            dot += 0.25 * q[g * ldq + j] * key[j];
            size += std::abs(0.25 * q[g * ldq + j] * key[j]);
          }
          ASSERT_NEAR(out[g * ld + i], dot, 6e-8 * std::abs(dot) + 1e-13 * size + 1e-37);
        }
      }
      for (size_t at = n; ld > n && at < ld; ++at) ASSERT_EQ(out[at], -77.0f) << "overrun";
    }
  }
}

TEST(Kernels, CombineMatchesFloat64) {
  Random random(testing::Seed("Kernels.Combine"));
  for (int round = 0; round < 200; ++round) {
    const size_t n = random.Int(0, 140), columns = random.Int(0, 140);
    const std::vector<float> floats = random.Normals(n + n * columns);
    const std::vector<double> w(floats.begin(), floats.begin() + static_cast<ptrdiff_t>(n));
    const std::vector<double> rows(floats.begin() + static_cast<ptrdiff_t>(n), floats.end());
    for (const KernelTable* table : Tables()) {
      SCOPED_TRACE(table->name);
      std::vector<double> out(columns, 1.5);
      table->combine(w.data(), n, rows.data(), columns, out.data());
      for (size_t l = 0; l < columns; ++l) {
        double sum = 1.5, size = 1.5;
        for (size_t i = 0; i < n; ++i) {
          sum += w[i] * rows[i * columns + l];
          size += std::abs(w[i] * rows[i * columns + l]);
        }
        ASSERT_NEAR(out[l], sum, 1e-14 * size);
      }
    }
  }
}

// Returns dimensions in which scores take centred sums along, and others.
uint32_t SumsDim(Random& random) {
  return random.Chance(0.5) ? 32 * random.Int(1, 8) : random.Int(1, 150);
}

// Sums alone or along with scores; the results must be equal.
void Sum(const KernelTable& table, const VectorBlock& keys, Random& random,
         const std::vector<float>& centre, std::vector<double>& first,
         std::vector<double>& second) {
  if (random.Chance(0.3)) {
    table.centred_sums(keys, centre.data(), first.data(), second.data());
    return;
  }
  const size_t heads = random.Int(1, 20), ldq = PadUp(keys.dim), ld = keys.n + random.Int(0, 2);
  std::vector<double> q(heads * ldq);
  for (size_t g = 0; g < heads; ++g) {
    for (uint32_t j = 0; j < keys.dim; ++j) q[g * ldq + j] = random.Normal();
  }
  std::vector<float> alone(heads * ld + 1, -77.0f), along = alone;
  table.score(q.data(), ldq, heads, keys, 0.25, alone.data(), ld);
  table.score_and_sums(q.data(), ldq, heads, keys, 0.25, along.data(), ld, centre.data(),
                       first.data(), second.data());
  EXPECT_EQ(along, alone);
  std::vector<double> by_themselves(keys.dim), squares(keys.dim);
  table.centred_sums(keys, centre.data(), by_themselves.data(), squares.data());
  std::vector<double> with_scores(keys.dim), squares_with_scores(keys.dim);
  table.score_and_sums(q.data(), ldq, heads, keys, 0.25, along.data(), ld, centre.data(),
                       with_scores.data(), squares_with_scores.data());
  EXPECT_EQ(with_scores, by_themselves);
  EXPECT_EQ(squares_with_scores, squares);
}

TEST(Kernels, WeightedSumAndCentredSumsMatchFloat64) {
  Random random(testing::Seed("Kernels.Sums"));
  for (int round = 0; round < 200; ++round) {
    const uint32_t dim = SumsDim(random);
    const size_t n = random.Int(0, 200), heads = random.Int(1, 9);
    const OwnedRows rows = testing::RandomRows(random, {dim, 1, random.AnyDType()}, n);
    const Scattered scattered(rows.view());
    const RowsView view = random.Chance(0.5) ? rows.view() : scattered.view();
    const std::vector<float> w = random.Normals(heads * n), centre = random.Normals(dim);
    std::vector<std::vector<float>> keys;
    for (size_t i = 0; i < n; ++i) keys.push_back(rows.Key(i));
    for (const KernelTable* table : Tables()) {
      SCOPED_TRACE(table->name);
      std::vector<double> acc(heads * dim, 1.5), first(dim, 0.5), second(dim, 0.25);
      table->weighted_sum(w.data(), n, heads, KeysOf(view), acc.data(), dim);
      Sum(*table, KeysOf(view), random, centre, first, second);
      for (uint32_t l = 0; l < dim; ++l) {
        double sum = 0.5, sum_sq = 0.25;
        for (size_t i = 0; i < n; ++i) {
          const double d = double{keys[i][l]} - centre[l];
          sum += d;
          sum_sq += d * d;
        }
        ASSERT_NEAR(first[l], sum, 1e-6 * (static_cast<double>(n) + sum_sq));
        ASSERT_NEAR(second[l], sum_sq, 2e-6 * sum_sq + 1e-12);
      }
      for (size_t g = 0; g < heads; ++g) {
        const uint32_t l = random.Int(0, dim - 1);
        double sum = 1.5, size = 0;
        for (size_t i = 0; i < n; ++i) {
          const double term = double{w[g * n + i]} * keys[i][l];
          sum += term;
          size += std::abs(term);
        }
        ASSERT_NEAR(acc[g * dim + l], sum, 1e-6 * size + 1e-12);
      }
    }
  }
}

// For a channel of large mean and small spread, the sums about the centre may only have the
// rounding of their own size, for every dtype.
TEST(Kernels, CentredSumsKeepSmallSpreadsAboutLargeMeans) {
  Random random(testing::Seed("Kernels.Centred"));
  for (int round = 0; round < 60; ++round) {
    const uint32_t dim = SumsDim(random);
    const size_t n = random.Int(1, 300);
    const float mean = std::exp2(static_cast<float>(random.Uniform(0, 10)));
    const float spread = mean * std::exp2(static_cast<float>(random.Uniform(-9, 0)));
    OwnedRows rows({dim, 1, random.AnyDType()}, n, random.Int(0, 3));
    for (size_t i = 0; i < n; ++i)
      rows.Set(i, random.Normals(dim, spread, mean), random.Normals(1));
    const std::vector<float> centre(dim, mean);
    for (const KernelTable* table : Tables()) {
      SCOPED_TRACE(table->name);
      std::vector<double> first(dim), second(dim);
      Sum(*table, KeysOf(rows.view()), random, centre, first, second);
      std::vector<double> want_first(dim), want_second(dim), size(dim);
      for (size_t i = 0; i < n; ++i) {
        const std::vector<float> key = rows.Key(i);
        for (uint32_t l = 0; l < dim; ++l) {
          const double d = double{key[l]} - centre[l];
          want_first[l] += d;
          want_second[l] += d * d;
          size[l] += std::abs(d);
        }
      }
      for (uint32_t l = 0; l < dim; ++l) {
        ASSERT_NEAR(first[l], want_first[l], 2e-6 * size[l] + 1e-12);
        ASSERT_NEAR(second[l], want_second[l], 4e-6 * want_second[l] + 1e-12);
      }
    }
  }
}

TEST(Kernels, LinesOfScores) {
  Random random(testing::Seed("Kernels.Lines"));
  for (size_t n : {size_t{0}, size_t{1}, size_t{15}, size_t{16}, size_t{257}, size_t{1000}}) {
    const std::vector<float> s = random.Normals(n, 3, 40);
    const Line line = {0.25f, -0.01f, 39.5f};
    for (const KernelTable* table : Tables()) {
      SCOPED_TRACE(table->name);
      std::vector<float> plain(n), out(n + 1, -77.0f);
      const double sum = table->exp_shifted(s.data(), n, 45, plain.data());
      EXPECT_EQ(table->exp_less_line(s.data(), n, 45, line, out.data()), sum);
      double total = 0, size = 0;
      for (size_t i = 0; i < n; ++i) {
        const double on_line = line.first + double{line.slope} * (double{s[i]} - line.centre);
        ASSERT_NEAR(out[i], plain[i] - on_line, 2e-7 * (plain[i] + 0.5));
        total += double{s[i]} - line.centre;
        size += std::abs(double{s[i]} - line.centre);
      }
      EXPECT_EQ(out[n], -77.0f) << "overrun";
      EXPECT_NEAR(table->centred_total(s.data(), n, line.centre), total, 1e-6 * size);
    }
  }
}

TEST(Kernels, ScopedKernelsLastAsLongAsTheirScope) {
  const KernelTable* before = &Kernels();
  {
    const ScopedKernels generic(*KernelsFor(Isa::kGeneric));
    EXPECT_EQ(&Kernels(), KernelsFor(Isa::kGeneric));
  }
  EXPECT_EQ(&Kernels(), before);
}

TEST(Kernels, ExpIsAccurateAndNeverMakesSubnormals) {
  Random random(testing::Seed("Kernels.Exp"));
  std::vector<float> x = {0, -0.0f, 1, 88, -87.3f, -87.4f, -1e30f, -100, 1e-20f};
  for (int i = 0; i < 5000; ++i) x.push_back(static_cast<float>(random.Uniform(-90, 60)));
  for (const KernelTable* table : Tables()) {
    for (size_t n : {x.size(), size_t{1}, size_t{17}, size_t{0}}) {
      std::vector<float> out(n);
      double expected = 0;
      const double sum = table->exp_shifted(x.data(), n, 0, out.data());
      for (size_t i = 0; i < n; ++i) {
        const double e = std::exp(double{x[i]});
        expected += out[i];
        if (e < std::numeric_limits<float>::min()) {
          ASSERT_LE(out[i], std::numeric_limits<float>::min() * 1.01f) << table->name;
        } else {
          ASSERT_NEAR(out[i] / e, 1.0, 2e-7) << table->name << " exp(" << x[i] << ")";
        }
      }
      ASSERT_NEAR(sum, expected, 1e-5 * expected);
    }
  }
}

TEST(Kernels, SoftcapMatchesTanh) {
  Random random(testing::Seed("Kernels.Softcap"));
  std::vector<float> x = {0, 1e-8f, 1e6f, -1e6f, 31.25f, -31.25f};
  for (int i = 0; i < 3000; ++i) x.push_back(random.Normal() * 60);
  for (const KernelTable* table : Tables()) {
    std::vector<float> capped = x;
    table->softcap(capped.data(), capped.size(), 50);
    for (size_t i = 0; i < x.size(); ++i) {
      const double exact = 50 * std::tanh(x[i] / 50.0);
      ASSERT_NEAR(capped[i], exact, 4e-7 * std::abs(exact)) << table->name << " of " << x[i];
    }
  }
}

TEST(Kernels, GeluMatchesItsErfForm) {
  Random random(testing::Seed("Kernels.Gelu"));
  std::vector<float> x = {0, 1e-8f, 1e6f, -1e6f, 5.6f, -5.6f, 5.7f, -5.7f};
  for (int i = 0; i < 5000; ++i) x.push_back(random.Normal() * 3);
  for (const KernelTable* table : Tables()) {
    std::vector<float> y = x;
    table->gelu(y.data(), y.size());
    for (size_t i = 0; i < x.size(); ++i) {
      const double exact = 0.5 * x[i] * (1 + std::erf(x[i] / std::sqrt(2.0)));
      ASSERT_NEAR(y[i], exact, 4e-7 * std::max(1.0f, std::abs(x[i]))) << table->name << " " << x[i];
    }
  }
}

TEST(Kernels, FiniteMaxFindsEveryNonFiniteElement) {
  Random random(testing::Seed("Kernels.FiniteMax"));
  using testing::kInf;
  for (const KernelTable* table : Tables()) {
    float max = 0;
    EXPECT_TRUE(table->finite_max(nullptr, 0, &max));
    EXPECT_EQ(max, -kInf);
    for (size_t n = 1; n < 70; ++n) {
      std::vector<float> x = random.Normals(n, 5);
      EXPECT_TRUE(table->finite_max(x.data(), n, &max));
      EXPECT_EQ(max, *std::max_element(x.begin(), x.end()));
      for (float bad : {kInf, -kInf, std::nanf("")}) {
        std::vector<float> y = x;
        y[random.Int(0, static_cast<uint32_t>(n) - 1)] = bad;
        EXPECT_FALSE(table->finite_max(y.data(), n, &max)) << table->name << " n " << n;
      }
    }
  }
}

TEST(Kernels, ConversionsAgreeWithTheScalarOnesOnEveryPattern) {
  std::vector<uint16_t> bits(65536);
  for (size_t i = 0; i < bits.size(); ++i) bits[i] = static_cast<uint16_t>(i);
  const auto* bytes = reinterpret_cast<const std::byte*>(bits.data());
  for (const KernelTable* table : Tables()) {
    for (DType dtype : {DType::kF16, DType::kBf16}) {
      std::vector<float> out(bits.size());
      table->to_float(dtype, bytes, bits.size(), out.data());
      for (size_t i = 0; i < bits.size(); ++i) {
        const float want = dtype == DType::kF16 ? F16ToFloat(bits[i]) : Bf16ToFloat(bits[i]);
        if (std::isnan(want)) {
          ASSERT_TRUE(std::isnan(out[i])) << table->name << " pattern " << i;
        } else {
          ASSERT_EQ(std::signbit(out[i]), std::signbit(want));
          ASSERT_EQ(out[i], want) << table->name << " pattern " << i;
        }
      }
    }
  }
}

}  // namespace
}  // namespace prefixd
