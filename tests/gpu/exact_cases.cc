#include "tests/gpu/exact_cases.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "attention/reference/reference.h"
#include "prefixd/gpu/step.h"
#include "tests/gpu/aligned_rows.h"
#include "tests/support/infinity.h"
#include "tests/support/test.h"

namespace prefixd::gpu::testing {
namespace {

using prefixd::testing::kInf;

ExactCase MakeCase(Random& random, RowShape row,
                   const std::vector<std::pair<uint32_t, uint32_t>>& rows_and_queries,
                   float query_scale = 1) {
  ExactCase c;
  c.shape.n_groups = static_cast<uint32_t>(rows_and_queries.size());
  c.shape.row = row;
  c.shape.layer = {1 / std::sqrt(static_cast<float>(row.key_dim)), 0, 0};
  c.shape.max_queries = 1;
  for (const auto& [n_rows, n_queries] : rows_and_queries) {
    ExactCase::Group group;
    group.rows = AlignedRows(random, row, n_rows);
    group.queries = random.Normals(size_t{n_queries} * row.key_dim, query_scale);
    group.by_address = random.Chance(0.3);
    c.shape.max_rows = std::max(c.shape.max_rows, n_rows);
    c.shape.max_queries = std::max(c.shape.max_queries, n_queries);
    c.groups.push_back(std::move(group));
  }
  return c;
}

// The bound that prefixd/gpu/exact.h promises.
void ExpectAttention(const ExactRunner& run, const ExactCase& c) {
  const Result<ExactResult> got = run(c);
  ASSERT_TRUE(got.ok()) << got.error().ToString();
  const uint32_t dv = c.shape.row.value_dim;
  for (size_t i = 0; i < c.groups.size(); ++i) {
    const ExactCase::Group& group = c.groups[i];
    const auto n = static_cast<uint32_t>(group.queries.size() / c.shape.row.key_dim);
    SCOPED_TRACE("group " + std::to_string(i) + ": " + std::to_string(group.rows.count()) +
                 " rows of " + std::to_string(c.shape.row.key_dim) + "+" + std::to_string(dv) +
                 " " + std::string(DTypeName(c.shape.row.dtype)) + ", " + std::to_string(n) +
                 " queries");
    ASSERT_EQ(got->errors[i], kGroupOk) << GroupError(got->errors[i], 0).error().message;
    const reference::States truth =
        reference::ExactAttention(group.queries, n, c.shape.layer, group.rows.view());
    for (uint32_t q = 0; q < n; ++q) {
      const size_t at = i * c.shape.max_queries + q;
      if (group.rows.count() == 0) {
        ASSERT_EQ(got->lse[at], -kInf);
        for (uint32_t d = 0; d < dv; ++d) ASSERT_EQ(got->y[at * dv + d], 0.0f);
        continue;
      }
      const double bound = 2e-6 + 4e-7 * truth.max_abs_score[q];
      ASSERT_NEAR(got->lse[at], truth.lse[q], bound + 1e-7 * std::fabs(truth.lse[q]))
          << "query " << q;
      for (uint32_t d = 0; d < dv; ++d) {
        ASSERT_NEAR(got->y[at * dv + d], truth.y[size_t{q} * dv + d],
                    bound * truth.abs_y[size_t{q} * dv + d] + 1e-30)
            << "query " << q << ", column " << d;
      }
    }
  }
}

}  // namespace

void ExactRandomBatches(const ExactRunner& run, uint64_t seed, int batches, uint32_t max_dim,
                        uint32_t max_rows, uint32_t max_queries) {
  Random random(seed);
  for (int i = 0; i < batches; ++i) {
    SCOPED_TRACE("batch " + std::to_string(i));
    RowShape row{random.Int(1, max_dim), random.Int(1, max_dim), random.AnyDType()};
    std::vector<std::pair<uint32_t, uint32_t>> sizes;
    for (uint32_t n = random.Int(1, 3); n > 0; --n) {
      sizes.emplace_back(random.Int(0, max_rows), random.Int(1, max_queries));
    }
    ExactCase c = MakeCase(random, row, sizes, random.Chance(0.2) ? 8.0f : 1.0f);
    if (random.Chance(0.2)) c.shape.layer.softcap = 15;
    ExpectAttention(run, c);
  }
}

void ExactHardCases(const ExactRunner& run, uint64_t seed) {
  Random random(seed);
  const uint32_t dims[] = {64, 80, 96, 128, 256};
  for (const uint32_t dim : dims) {
    for (const DType dtype : {DType::kF32, DType::kF16, DType::kBf16}) {
      ExpectAttention(run, MakeCase(random, {dim, dim, dtype}, {{75, 5}}));
    }
  }
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBf16}) {
    const RowShape row{32, 24, dtype};
    ExpectAttention(run, MakeCase(random, row, {{1, 1}, {0, 3}, {32, 64}, {33, 65}}));
    ExpectAttention(run, MakeCase(random, row, {{90, 20}}, 25));  // scores of +-80
    // A channel with a large mean, in keys and in values.
    ExactCase mean = MakeCase(random, row, {{600, 9}});
    for (uint32_t i = 0; i < 600; ++i) {
      std::vector<float> k = mean.groups[0].rows.Key(i), v = mean.groups[0].rows.Value(i);
      k[5] += 30;
      v[7] += 30;
      mean.groups[0].rows.Set(i, k, v);
    }
    ExpectAttention(run, mean);
    ExactCase same = MakeCase(random, row, {{200, 3}});
    const std::vector<float> key = same.groups[0].rows.Key(0);
    for (uint32_t i = 0; i < 200; ++i)
      same.groups[0].rows.Set(i, key, same.groups[0].rows.Value(i));
    ExpectAttention(run, same);
  }

  // Errors of one group leave the others alone.
  const auto error_of = [&](const ExactCase& c, size_t index) {
    const Result<ExactResult> got = run(c);
    if (!got.ok()) return got.error().message;
    EXPECT_EQ(got->errors[0], kGroupOk);
    const Status status = GroupError(got->errors[index], 1000);
    return status.ok() ? std::string("no error") : status.error().message;
  };
  ExactCase bad = MakeCase(random, {16, 16, DType::kBf16}, {{50, 3}, {70, 4}});
  std::vector<float> value = bad.groups[1].rows.Value(66);
  value[3] = kInf;
  bad.groups[1].rows.Set(66, bad.groups[1].rows.Key(66), value);
  EXPECT_NE(error_of(bad, 1).find("row 66: its value"), std::string::npos) << error_of(bad, 1);
  ExactCase query = MakeCase(random, {16, 16, DType::kF16}, {{50, 3}, {70, 4}});
  query.groups[1].queries[2 * 16 + 1] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_NE(error_of(query, 1).find("query head 2"), std::string::npos) << error_of(query, 1);
  // Scores beyond float32, of either sign and hidden by a cap or not: the query is named.
  for (const float large : {1e38f, -1e38f}) {
    for (const uint32_t at : {0u, 9u, 18u}) {
      ExactCase beyond = MakeCase(random, {16, 16, DType::kBf16}, {{50, 3}, {300, 19}});
      std::fill_n(beyond.groups[1].queries.begin() + at * 16, 16, large);
      for (uint32_t i = 0; i < 300; ++i) {
        beyond.groups[1].rows.Set(i, std::vector<float>(16, 1), beyond.groups[1].rows.Value(i));
      }
      beyond.shape.layer.scale = 1;
      const std::string name = "query head " + std::to_string(at) + " is not finite";
      EXPECT_NE(error_of(beyond, 1).find(name), std::string::npos) << error_of(beyond, 1);
    }
  }
  ExactCase capped = MakeCase(random, {16, 16, DType::kBf16}, {{50, 3}, {70, 16}});
  std::vector<float> infinite = capped.groups[1].rows.Key(41);
  infinite[0] = kInf;
  capped.groups[1].rows.Set(41, infinite, capped.groups[1].rows.Value(41));
  // All parts of the query's element have one sign: nothing becomes NaN.
  for (uint32_t q = 0; q < 16; ++q) capped.groups[1].queries[q * 16] = 1 + 0x1p-9f + 0x1p-18f;
  capped.shape.layer.softcap = 15;
  EXPECT_NE(error_of(capped, 1).find("row 41: its key"), std::string::npos) << error_of(capped, 1);
  ExactCase lost = MakeCase(random, {16, 16, DType::kBf16}, {{50, 3}, {70, 4}});
  lost.groups[1].by_address = true;
  lost.groups[1].null_row = 68;
  EXPECT_NE(error_of(lost, 1).find("address of row 68"), std::string::npos) << error_of(lost, 1);
  ExactCase many = MakeCase(random, {16, 16, DType::kF32}, {{50, 3}, {70, 4}});
  many.shape.max_rows = 69;
  EXPECT_NE(error_of(many, 1).find("do not fit"), std::string::npos) << error_of(many, 1);
}

}  // namespace prefixd::gpu::testing
