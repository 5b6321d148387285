// Tests ExactAttention, Scores and MergeStates against the float64 reference.
#include <cmath>

#include "attention/reference/reference.h"
#include "attention/step/step.h"
#include "prefixd/merge.h"
#include "tests/attention/step_fixture.h"
#include "tests/support/infinity.h"
#include "tests/support/seed.h"
#include "tests/support/test.h"

namespace prefixd {
namespace {

using testing::OwnedRows;
using testing::Random;

using testing::kInf;

void ExpectExact(std::span<const float> y, std::span<const float> lse,
                 const reference::States& want, uint32_t value_dim) {
  for (size_t g = 0; g < lse.size(); ++g) {
    const double bound = testing::ExactBound(want.max_abs_score[g]);
    if (want.lse[g] == -kInf) {
      ASSERT_EQ(lse[g], -kInf);
    } else {
      ASSERT_NEAR(lse[g], want.lse[g], bound + 1e-7 * std::abs(want.lse[g])) << "head " << g;
    }
    for (uint32_t l = 0; l < value_dim; ++l) {
      const size_t at = g * value_dim + l;
      ASSERT_NEAR(y[at], want.y[at], bound * want.abs_y[at] + 1e-30) << "head " << g << " " << l;
    }
  }
}

TEST(ExactAttention, RandomShapesWithinTheBound) {
  Random random(testing::Seed("ExactAttention.Random"));
  for (int round = 0; round < 250; ++round) {
    const RowShape shape{random.Int(1, 256), random.Int(1, 128), random.AnyDType()};
    const size_t n = random.Chance(0.1) ? random.Int(1000, 2600) : random.Int(0, 200);
    const uint32_t queries = n > 500 ? random.Int(1, 3) : random.Int(1, 40);
    const OwnedRows rows = testing::RandomRows(random, shape, n);
    LayerGeometry layer{1 / std::sqrt(static_cast<float>(shape.key_dim)), 0, 0};
    if (random.Chance(0.2)) layer.softcap = static_cast<float>(random.Uniform(1, 60));
    const std::vector<float> q = random.Normals(
        size_t{queries} * shape.key_dim, static_cast<float>(std::exp2(random.Uniform(-4, 5))));
    std::vector<float> y(size_t{queries} * shape.value_dim), lse(queries);
    SCOPED_TRACE("round " + std::to_string(round) + " dk " + std::to_string(shape.key_dim) +
                 " dv " + std::to_string(shape.value_dim) + " " +
                 std::string(DTypeName(shape.dtype)) + " n " + std::to_string(n));
    std::vector<RowRef> refs;
    for (size_t i = 0; i < n; ++i) refs.push_back({rows.view().key(i), rows.view().value(i)});
    const RowsView view = random.Chance(0.5) ? rows.view() : ScatteredRows(refs, shape);
    const Status status = ExactAttention(q, queries, layer, view, y, lse);
    ASSERT_TRUE(status.ok()) << status.error().message;
    ExpectExact(y, lse, reference::ExactAttention(q, queries, layer, rows.view()), shape.value_dim);
  }
}

TEST(ExactAttention, SplitAnywhereAndMergedIsTheWhole) {
  Random random(testing::Seed("ExactAttention.Merge"));
  for (int round = 0; round < 100; ++round) {
    const RowShape shape{32, 24, DType::kF32};
    const OwnedRows rows = testing::RandomRows(random, shape, 150);
    const LayerGeometry layer{0.2f, 0, 0};
    const std::vector<float> q = random.Normals(32, 10);
    const size_t split = random.Int(0, 150);
    std::vector<float> a(24), b(24), lse_a(1), lse_b(1);
    ASSERT_TRUE(ExactAttention(q, 1, layer, rows.view().Sub(0, split), a, lse_a).ok());
    ASSERT_TRUE(ExactAttention(q, 1, layer, rows.view().Sub(split, 150 - split), b, lse_b).ok());
    MergeStates(a, lse_a.data(), b, lse_b[0]);
    const reference::States want = reference::ExactAttention(q, 1, layer, rows.view());
    const double bound = 4 * testing::ExactBound(want.max_abs_score[0]);
    EXPECT_NEAR(lse_a[0], want.lse[0], bound);
    for (uint32_t l = 0; l < 24; ++l) ASSERT_NEAR(a[l], want.y[l], bound * want.abs_y[l]);
  }
}

TEST(MergeStates, EmptySidesAndExtremes) {
  std::vector<float> a = {0, 0};
  const std::vector<float> b = {1, -2};
  float lse = -kInf;
  MergeStates(a, &lse, std::vector<float>{0, 0}, -kInf);
  EXPECT_EQ(lse, -kInf);
  EXPECT_EQ(a[0], 0);
  MergeStates(a, &lse, b, 3);
  EXPECT_EQ(lse, 3);
  EXPECT_EQ(a[1], -2);
  MergeStates(a, &lse, std::vector<float>{9, 9}, -kInf);
  EXPECT_EQ(a[0], 1);
  MergeStates(a, &lse, std::vector<float>{5, 5}, 3);
  EXPECT_FLOAT_EQ(a[0], 3);
  EXPECT_FLOAT_EQ(lse, 3 + std::log(2.0f));
  lse = 1e4f;
  MergeStates(a, &lse, std::vector<float>{7, 7}, -1e4f);
  EXPECT_EQ(lse, 1e4f);
  EXPECT_FLOAT_EQ(a[0], 3);
}

TEST(ExactAttention, NonFiniteInputsAreNamed) {
  Random random(testing::Seed("ExactAttention.NonFinite"));
  const LayerGeometry layer{0.25f, 0, 0};
  for (float bad : {kInf, -kInf, std::nanf("")}) {
    for (int where = 0; where < 3; ++where) {
      OwnedRows rows = testing::RandomRows(random, {16, 8, DType::kBf16}, 200);
      std::vector<float> q = random.Normals(3 * 16), y(3 * 8), lse(3);
      std::vector<float> key = rows.Key(137), value = rows.Value(137);
      if (where == 0) q[2 * 16 + 5] = bad;
      if (where == 1) key[3] = bad;
      if (where == 2) value[7] = bad;
      rows.Set(137, key, value);
      const Status status = ExactAttention(q, 3, layer, rows.view(), y, lse);
      ASSERT_FALSE(status.ok());
      EXPECT_EQ(status.error().code, Code::kInvalidArgument);
      const char* expected[] = {"query head 2", "rows key: row 137", "rows value: row 137"};
      EXPECT_NE(status.error().message.find(expected[where]), std::string::npos)
          << status.error().message;
    }
  }
}

TEST(ExactAttention, WrongShapesAreRefused) {
  OwnedRows rows({16, 8, DType::kF32}, 4);
  std::vector<float> q(32), y(16), lse(2);
  EXPECT_FALSE(ExactAttention(q, 3, {1, 0, 0}, rows.view(), y, lse).ok());
  EXPECT_FALSE(ExactAttention(q, 2, {1, 0, 0}, rows.view(), std::span(y).first(15), lse).ok());
}

TEST(Scores, MatchTheReference) {
  Random random(testing::Seed("Scores"));
  for (int round = 0; round < 100; ++round) {
    const RowShape shape{random.Int(1, 200), 4, random.AnyDType()};
    const uint32_t group = random.Int(1, 16);
    const OwnedRows rows = testing::RandomRows(random, shape, random.Int(0, 60));
    const LayerGeometry layer{0.1f, random.Chance(0.3) ? 20.0f : 0.0f, 0};
    const std::vector<float> q = random.Normals(size_t{group} * shape.key_dim, 4);
    const size_t n = rows.count(), ld = n + random.Int(0, 20);
    constexpr float kOthers = -77;
    std::vector<float> scores(group * ld, kOthers), dense(group * n);
    Scores(q, group, layer, rows.view(), scores, ld);
    Scores(q, group, layer, rows.view(), dense);
    for (uint32_t g = 0; g < group; ++g) {
      const std::vector<double> want = reference::Scores(
          std::span(q).subspan(size_t{g} * shape.key_dim, shape.key_dim), layer, rows.view());
      for (size_t i = 0; i < n; ++i) {
        ASSERT_NEAR(scores[g * ld + i], want[i], 1e-5);
        ASSERT_NEAR(dense[g * n + i], want[i], 1e-5);
      }
      for (size_t i = n; i < ld; ++i) ASSERT_EQ(scores[g * ld + i], kOthers);
    }
  }
}

}  // namespace
}  // namespace prefixd
