// Tests keys that outweigh all others: a phi cache keeps them apart, so that what is left beside
// them can still be estimated.
#include "attention/estimators/outweighing.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "attention/reference/diagnostics.h"
#include "tests/attention/step_checks.h"
#include "tests/attention/step_fixture.h"
#include "tests/support/seed.h"
#include "tests/support/test.h"

namespace prefixd {
namespace {

using testing::OwnedRows;
using testing::Random;
using testing::RandomCase;
using testing::StepCase;
using testing::StepOf;
using testing::StepOutput;

constexpr float kEmpty = -std::numeric_limits<float>::infinity();

// log phi(x) = (x, -x): a long key outweighs in the features of its own direction.
FeatureMap Mirror(uint32_t dim) {
  FeatureMap map;
  map.in_dim = map.d_emb = dim;
  map.d_phi = 2 * dim;
  map.w_in.assign(size_t{dim} * dim, 0);
  map.w1 = map.w2 = map.w_in;
  map.b_in.assign(dim, 0);
  map.b1 = map.b2 = map.b_in;
  map.w_out.assign(size_t{2} * dim * dim, 0);
  map.b_out.assign(2 * dim, 0);
  for (uint32_t j = 0; j < dim; ++j) {
    map.w_in[j * dim + j] = 1;
    map.w_out[j * dim + j] = 1;
    map.w_out[(dim + j) * dim + j] = -1;
  }
  return map;
}

// Keys of normal numbers, but those of `outliers`, which are some `scale` times as long.
StepCase Outliers(Random& random, uint32_t n, const std::vector<uint32_t>& outliers,
                  float scale = 12) {
  StepCase c = RandomCase(random, n, {16, 8, DType::kBf16}, {2, 4}, 2, 0.2);
  for (const uint32_t i : outliers) {
    std::vector<float> key = c.rows.Key(i);
    key[3] = scale * 4;
    c.rows.Set(i, key, c.rows.Value(i));
  }
  c.phi_k = Mirror(16);
  c.phi_q.assign(2, c.phi_k);
  c.phi = PhiCache(32, 8);
  c.phi.Add(c.Mid(), c.phi_k);
  return c;
}

PhiCache CacheOf(const StepCase& c, const RowsView& rows) {
  PhiCache cache(c.phi_k.d_phi, c.shape().value_dim);
  cache.Add(rows, c.phi_k);
  return cache;
}

void ExpectSameSums(const PhiCache& a, const PhiCache& b) {
  for (uint32_t f = 0; f < a.d_phi(); ++f) {
    ASSERT_EQ(a.m()[f], b.m()[f]);
    ASSERT_NEAR(a.u()[f], b.u()[f], 1e-5 * b.u()[f]);
    for (uint32_t l = 0; l < a.value_dim(); ++l) {
      const size_t at = size_t{f} * a.value_dim() + l;
      ASSERT_NEAR(a.t()[at], b.t()[at], 3e-5 * b.u()[f]);
    }
  }
}

// The failure that this is for: with the long key retrieved nothing was left of the others, and
// the output was that of selection alone.
TEST(Outweighing, TheOthersAreEstimatedBesideARetrievedKey) {
  Random random(20);
  StepCase c = Outliers(random, 400, {50});
  c.cuts.assign(2, {0.5f, CutKind::kApproximate});
  c.Retrieve({50});
  const StepOutput out = StepOf(c, EstimatorKind::kPhi), without = StepOf(c, EstimatorKind::kNone);
  const reference::States full =
      reference::ExactAttention(c.queries, c.group, c.layer, c.rows.view());
  const std::vector<float> exact(full.y.begin(), full.y.end());
  StepCase rest = c;  // the others' own cache, with nothing to subtract
  const OwnedRows others = c.Rest();
  rest.phi = CacheOf(c, others.view());
  ASSERT_TRUE(rest.phi.apart().empty());
  for (uint32_t g = 0; g < c.group; ++g) {
    EXPECT_GT(out.rho_z[g], 0.1f);
    const auto estimate = reference::EstimatePhi(c.Input(EstimatorKind::kPhi), g, PhiForm::kSigned);
    EXPECT_NEAR(estimate.share, 1, 1e-9) << "nothing was subtracted from the sums";
    const auto part = [&](const std::vector<float>& y) { return std::span(y).subspan(g * 8, 8); };
    const double error = RelativeL1(part(out.y), part(exact));
    EXPECT_LT(error, 0.7 * RelativeL1(part(without.y), part(exact)));
  }
  std::vector<float> log_z(2), y(16), want_z(2), want_y(16);
  ASSERT_TRUE(EstimateRemainder(c.Input(EstimatorKind::kPhi), log_z, y).ok());
  GroupStepInput direct = rest.Input(EstimatorKind::kPhi);
  direct.retrieved = {};
  direct.mid_count = rest.phi.count();
  ASSERT_TRUE(EstimateRemainder(direct, want_z, want_y).ok());
  for (size_t g = 0; g < 2; ++g) EXPECT_NEAR(log_z[g], want_z[g], 1e-4);
  for (size_t i = 0; i < 16; ++i) EXPECT_NEAR(y[i], want_y[i], 1e-3);
}

// Read or not, several of them, equal ones, in both forms: as the slow reference has it.
TEST(Outweighing, RowsKeptApartAreCountedOnceAndExactly) {
  Random random(testing::Seed("Outweighing.Exactly"));
  for (const std::vector<uint32_t>& outliers :
       {std::vector<uint32_t>{50}, {50, 51, 200}, {10, 20, 30, 40}}) {
    StepCase c = Outliers(random, 300, outliers);
    c.rows.Set(80, c.rows.Key(outliers[0]), c.rows.Value(outliers[0]));  // the same once more
    c.phi = CacheOf(c, c.Mid());
    // Five that are alike are no outliers.
    EXPECT_EQ(c.phi.apart().size(), outliers.size() < kMostApart ? outliers.size() + 1 : 0);
    EXPECT_EQ(c.phi.count(), c.parts.mid.size());
    for (const std::vector<uint32_t>& ids :
         {std::vector<uint32_t>{}, {9, 50}, {50, 80, 90}, {5, 100}, {10, 20, 30, 40, 50, 80}}) {
      c.Retrieve(ids);
      for (const PhiForm form : {PhiForm::kSigned, PhiForm::kPerFeature}) {
        GroupStepInput in = c.Input(EstimatorKind::kPhi);
        in.phi_form = form;
        StepOutput out = c.Buffers();
        ASSERT_TRUE(GroupStep(in, out.spans()).ok());
        const reference::States want = reference::GroupStep(in, 8);
        for (uint32_t g = 0; g < 2; ++g) {
          EXPECT_NEAR(out.lse[g], want.lse[g], 1e-3);
          for (int l = 0; l < 8; ++l) EXPECT_NEAR(out.y[g * 8 + l], want.y[g * 8 + l], 3e-3);
        }
      }
    }
  }
}

TEST(Outweighing, CachesOfPiecesMergeToTheWholes) {
  Random random(testing::Seed("Outweighing.Merge"));
  for (int round = 0; round < 20; ++round) {
    const StepCase c = Outliers(random, 700, {100, 650});
    const PhiCache whole = CacheOf(c, c.Mid());
    ASSERT_EQ(whole.apart().size(), 2u);
    PhiCache merged(32, 8), added(32, 8);
    for (size_t begin = 0; begin < c.Mid().count;) {
      const size_t n = std::min<size_t>(random.Int(1, 200), c.Mid().count - begin);
      const RowsView piece = c.Mid().Sub(begin, n);
      merged.Merge(CacheOf(c, piece));
      added.Add(piece, c.phi_k);
      begin += n;
    }
    for (const PhiCache* cache : {&merged, &added}) {
      ASSERT_EQ(cache->count(), whole.count());
      ASSERT_EQ(cache->apart().size(), 2u);
      for (const ApartRow& row : cache->apart()) {
        EXPECT_EQ(std::ranges::count(whole.apart(), row), 1);
      }
      ExpectSameSums(*cache, whole);
    }
    const auto bytes = whole.Serialize();
    EXPECT_EQ(bytes.size(), 32 + whole.bytes());
    EXPECT_EQ(whole.apart_bytes(), 2 * 4 * (16 + 8 + 32u));
    const auto back = PhiCache::Deserialize(bytes);
    ASSERT_TRUE(back.ok()) << back.error().message;
    EXPECT_EQ(back->Serialize(), bytes);
    EXPECT_TRUE(std::ranges::equal(back->apart(), whole.apart()));
    for (const size_t n : {bytes.size() - 1, bytes.size() - 4, bytes.size() - 56 * 4}) {
      EXPECT_FALSE(PhiCache::Deserialize(std::span(bytes).first(n)).ok());
    }
  }
}

// What outweighs a few tokens may be usual among many: it returns to the sums.
TEST(Outweighing, ARowThatOutweighsNoMoreIsAddedToTheSums) {
  Random random(testing::Seed("Outweighing.Return"));
  const StepCase few = Outliers(random, 60, {30}, 4);
  ASSERT_EQ(few.phi.apart().size(), 1u);
  const StepCase many = Outliers(random, 60, {8, 12, 16, 20, 24, 28}, 4);  // too many for outliers
  EXPECT_TRUE(many.phi.apart().empty());
  PhiCache both = few.phi;
  both.Merge(many.phi);
  EXPECT_TRUE(both.apart().empty());
  PhiCache want = CacheOf(many, many.Mid());
  want.Add(few.Mid(), few.phi_k);
  EXPECT_EQ(both.count(), want.count());
  ExpectSameSums(both, want);
}

TEST(Outweighing, RowsAreFoundByTheGapBelowThem) {
  std::vector<float> log_phi(40, 0.0f);
  EXPECT_TRUE(OutweighingRows(log_phi, 40, 1).empty());
  log_phi[7] = 10.4f;  // log(39) + 6.9 is 10.57
  EXPECT_TRUE(OutweighingRows(log_phi, 40, 1).empty());
  log_phi[7] = 10.7f;
  EXPECT_EQ(OutweighingRows(log_phi, 40, 1), (std::vector<uint32_t>{7}));
  log_phi[3] = 90;  // 7 lies above all below
  log_phi[5] = 90;
  EXPECT_EQ(OutweighingRows(log_phi, 40, 1), (std::vector<uint32_t>{3, 5, 7}));
  log_phi[7] = 5;
  EXPECT_EQ(OutweighingRows(log_phi, 40, 1), (std::vector<uint32_t>{3, 5}));
  for (const size_t i : {1, 2, 8}) log_phi[i] = 90;  // five of a kind are no outliers
  EXPECT_TRUE(OutweighingRows(log_phi, 40, 1).empty());
  std::ranges::fill(log_phi, kEmpty);
  EXPECT_TRUE(OutweighingRows(log_phi, 40, 1).empty());
  log_phi[9] = -300;
  EXPECT_EQ(OutweighingRows(log_phi, 40, 1), (std::vector<uint32_t>{9}));
  EXPECT_TRUE(OutweighingRows(std::span(log_phi).first(1), 1, 1).empty());
  EXPECT_TRUE(OutweighingRows({}, 0, 1).empty());
}

}  // namespace
}  // namespace prefixd
