// Tests the bound that attention/step/step.h promises for the exact part: for rows of any dtype as
// stored,
//   |y - y64| <= (2e-6 + 4e-7 max|s|) * sum p|v|
// over random cases, cancelling terms included, and over every hard case by name.
#include <cmath>
#include <string>

#include "attention/kernels/kernels.h"
#include "tests/attention/step_fixture.h"
#include "tests/support/infinity.h"
#include "tests/support/seed.h"
#include "tests/support/test.h"

namespace prefixd {
namespace {

using testing::OwnedRows;
using testing::Random;
using testing::StepCase;
using testing::StepOutput;

using testing::kInf;

// Selects how the keys of a case are made.
enum class Keys { kNormal, kCancelling, kLargeMean, kIdentical, kEighty, kTiny, kCount };

// Makes rows and queries whose scores are of the named kind. Cancelling: pairs of channels hold the
// same large number and the query weighs them with opposite signs, so that 1e-3 of the terms and
// less remains.
StepCase MakeCase(Random& random, Keys kind, uint32_t n, RowShape shape, Anchors anchors,
                  uint32_t group) {
  const uint32_t dim = shape.key_dim;
  OwnedRows rows(shape, n, random.Chance(0.3) ? random.Int(1, 9) : 0);
  const float spread = std::exp2(static_cast<float>(random.Uniform(-3, 4)));
  std::vector<float> queries = random.Normals(size_t{group} * dim, spread);
  const std::vector<float> shared = random.Normals(dim);
  const float size = std::exp2(static_cast<float>(random.Uniform(0, 10)));
  for (size_t i = 0; i < n; ++i) {
    std::vector<float> key = random.Normals(dim);
    if (kind == Keys::kCancelling) {
      for (uint32_t j = 0; j + 1 < dim; j += 2) key[j + 1] = key[j] = size * random.Normal();
    } else if (kind == Keys::kLargeMean) {
      key[i % 7 % dim] *= 0.1f;
      key[0] += 30;
    } else if (kind == Keys::kIdentical) {
      key = shared;
    } else if (kind == Keys::kEighty) {
      key.assign(dim, 0.0f);
      key[i % dim] = i % 2 ? 80.0f : -80.0f;
    } else if (kind == Keys::kTiny) {
      for (float& x : key) x *= 1e-6f;
    }
    rows.Set(i, key, random.Normals(shape.value_dim));
  }
  float scale = 1 / std::sqrt(static_cast<float>(dim));
  if (kind == Keys::kCancelling) {
    for (uint32_t g = 0; g < group; ++g) {
      float* q = queries.data() + size_t{g} * dim;
      for (uint32_t j = 0; j + 1 < dim; j += 2) q[j + 1] = -q[j] * (1 + 1e-3f * random.Normal());
    }
  } else if (kind == Keys::kEighty) {
    queries.assign(queries.size(), 1.0f);
    scale = 1;
  }
  return StepCase(std::move(rows), anchors, group, std::move(queries), scale);
}

// Returns the largest error in units of the bound, with the kernels in use.
double WorstRatioHere(const StepCase& c, const GroupStepInput& in, const reference::States& want) {
  StepOutput out = c.Buffers();
  const Status status = GroupStep(in, out.spans());
  EXPECT_TRUE(status.ok()) << (status.ok() ? "" : status.error().message);
  double worst = 0;
  for (uint32_t g = 0; g < c.group; ++g) {
    const double bound = testing::ExactBound(want.max_abs_score[g]);
    if (want.lse[g] == -kInf) {
      EXPECT_EQ(out.lse[g], -kInf);
      continue;
    }
    EXPECT_NEAR(out.lse[g], want.lse[g], bound + 1e-7 * std::abs(want.lse[g]));
    for (uint32_t l = 0; l < c.shape().value_dim; ++l) {
      const size_t at = size_t{g} * c.shape().value_dim + l;
      const double error = std::abs(out.y[at] - want.y[at]);
      worst = std::max(worst, (error - 1e-37) / (bound * want.abs_y[at] + 1e-300));
    }
  }
  return worst;
}

// Returns the same over every instruction set's kernels, for rows copied together and for rows read
// in place.
double WorstRatio(const StepCase& c) {
  GroupStepInput in = c.Input(EstimatorKind::kNone);
  const reference::States want = reference::GroupStep(in, c.shape().value_dim);
  std::vector<RowRef> refs;
  for (uint32_t id : c.ids) refs.push_back({c.rows.view().key(id), c.rows.view().value(id)});
  double worst = 0;
  for (Isa isa : kAllIsas) {
    const KernelTable* table = KernelsFor(isa);
    if (table == nullptr) continue;
    SCOPED_TRACE(table->name);
    const ScopedKernels use(*table);
    in.retrieved = c.retrieved.view();
    worst = std::max(worst, WorstRatioHere(c, in, want));
    in.retrieved = ScatteredRows(refs, c.shape());
    worst = std::max(worst, WorstRatioHere(c, in, want));
  }
  return worst;
}

void Retrieve(Random& random, StepCase& c) {
  const uint32_t mid = c.parts.mid.size();
  const uint32_t k = random.Chance(0.1) ? mid : random.Chance(0.1) ? 0 : random.Int(0, mid);
  if (random.Chance(0.5)) {
    c.RetrieveTop(k);
  } else {
    c.Retrieve(testing::RandomSubset(random, c.parts.mid.begin, c.parts.mid.end, k));
  }
}

TEST(ErrorBound, HoldsOnTwelveThousandRandomCases) {
  Random random(testing::Seed("ErrorBound.Random"));
  for (int round = 0; round < 12000; ++round) {
    const Keys kind = static_cast<Keys>(round % static_cast<int>(Keys::kCount));
    const uint32_t max_dim = round % 40 == 0 ? 256 : 40;
    const RowShape shape{random.Int(1, max_dim), random.Int(1, max_dim), random.AnyDType()};
    StepCase c =
        MakeCase(random, kind, random.Int(0, 70), shape, {random.Int(0, 5), random.Int(0, 17)},
                 random.Chance(0.2) ? 1 : random.Int(1, 16));
    Retrieve(random, c);
    const double worst = WorstRatio(c);
    ASSERT_LE(worst, 1) << "round " << round << " keys " << static_cast<int>(kind) << " N "
                        << c.rows.count() << " G " << c.group << " K " << c.ids.size() << " dk "
                        << shape.key_dim << " " << DTypeName(shape.dtype);
  }
}

TEST(ErrorBound, HoldsInEveryHardCaseAndDType) {
  Random random(testing::Seed("ErrorBound.Hard"));
  struct Case {
    const char* name;
    uint32_t n, k;  // k is cut to the mid region
    Anchors anchors;
    uint32_t group;
    Keys keys;
  };
  const Case cases[] = {
      {"empty prefix", 0, 0, {}, 4, Keys::kNormal},
      {"one token", 1, 0, {}, 4, Keys::kNormal},
      {"one token, no anchors", 1, 1, {0, 0}, 4, Keys::kNormal},
      {"anchors cover everything", 20, 0, {}, 4, Keys::kCancelling},
      {"empty mid", 16, 0, {4, 16}, 4, Keys::kNormal},
      {"nothing retrieved", 400, 0, {}, 4, Keys::kCancelling},
      {"empty remainder", 400, 400, {}, 4, Keys::kCancelling},
      {"identical keys", 900, 500, {}, 4, Keys::kIdentical},
      {"scores of 80", 300, 200, {}, 4, Keys::kEighty},
      {"cancelling scores", 4000, 3000, {}, 4, Keys::kCancelling},
      {"a channel of mean 30", 4000, 3000, {}, 4, Keys::kLargeMean},
      {"one head", 500, 300, {}, 1, Keys::kCancelling},
      {"one KV head for all", 500, 300, {}, 32, Keys::kCancelling},
  };
  for (const Case& hard : cases) {
    for (DType dtype : {DType::kF32, DType::kF16, DType::kBf16}) {
      SCOPED_TRACE(std::string(hard.name) + " " + std::string(DTypeName(dtype)));
      StepCase c = MakeCase(random, hard.keys, hard.n, {128, 128, dtype}, hard.anchors, hard.group);
      c.RetrieveTop(hard.k);
      EXPECT_LE(WorstRatio(c), 1);
    }
  }
}

TEST(ErrorBound, HoldsOverAMillionTokensWithAChannelOfMeanThirty) {
  Random random(testing::Seed("ErrorBound.Million"));
  StepCase c = MakeCase(random, Keys::kLargeMean, 1000000, {8, 4, DType::kBf16}, {}, 2);
  std::vector<uint32_t> all(c.parts.mid.size());
  for (uint32_t i = 0; i < all.size(); ++i) all[i] = c.parts.mid.begin + i;
  c.Retrieve(std::move(all));
  EXPECT_LE(WorstRatio(c), 1);
}

// The streaming pass promises the same bound.
TEST(ErrorBound, HoldsForSuffixQueries) {
  Random random(testing::Seed("ErrorBound.Suffix"));
  for (int round = 0; round < 60; ++round) {
    const Keys kind = static_cast<Keys>(round % static_cast<int>(Keys::kCount));
    const uint32_t n = random.Int(1, 40);
    const StepCase c = MakeCase(random, kind, random.Int(1, 3000),
                                {random.Int(1, 130), random.Int(1, 70), random.AnyDType()}, {}, n);
    const reference::States want = reference::ExactAttention(c.queries, n, c.layer, c.rows.view());
    for (Isa isa : kAllIsas) {
      const KernelTable* table = KernelsFor(isa);
      if (table == nullptr) continue;
      const ScopedKernels use(*table);
      StepOutput out = c.Buffers();
      const Status status = ExactAttention(c.queries, n, c.layer, c.rows.view(), out.y, out.lse);
      ASSERT_TRUE(status.ok());
      for (size_t at = 0; at < out.y.size(); ++at) {
        const double bound = testing::ExactBound(want.max_abs_score[at / c.shape().value_dim]);
        ASSERT_NEAR(out.y[at], want.y[at], bound * want.abs_y[at] + 1e-37)
            << "round " << round << " " << table->name;
      }
    }
  }
}

}  // namespace
}  // namespace prefixd
