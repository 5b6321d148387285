#include "attention/step/missing_mass.h"

#include <cmath>
#include <numeric>

#include "tests/support/infinity.h"
#include "tests/support/random_kv.h"
#include "tests/support/seed.h"
#include "tests/support/test.h"

namespace prefixd {
namespace {

using testing::kInf;

TEST(MissingMass, IsCertifiedOnlyUnderAnExactCut) {
  const MissingMass exact = MissingMassOf({1, CutKind::kExact}, 10, 5, 0.3);
  EXPECT_TRUE(exact.certified);
  EXPECT_NEAR(exact.delta, 10 * std::exp(1) / (std::exp(5) + 10 * std::exp(1)), 1e-12);
  for (CutKind kind : {CutKind::kApproximate, CutKind::kNone}) {
    const MissingMass estimate = MissingMassOf({1, kind}, 10, 5, 0.3);
    EXPECT_FALSE(estimate.certified);
    EXPECT_EQ(estimate.delta, 0.3);
  }
  EXPECT_EQ(MissingMassOf({1, CutKind::kNone}, 0, 5, 0.3).delta, 0);
  EXPECT_EQ(MissingMassOf({-kInf, CutKind::kExact}, 10, 5, 0.3).delta, 0);
  EXPECT_EQ(MissingMassOf({kInf, CutKind::kExact}, 10, 5, 0.3).delta, 1);
  EXPECT_EQ(MissingMassOf({0, CutKind::kExact}, 10, -kInf, 0.3).delta, 1) << "nothing was read";
  EXPECT_EQ(MissingMassOf({1e30f, CutKind::kExact}, 10, 5, 0).delta, 1) << "no overflow";
  EXPECT_EQ(MissingMassOf({0, CutKind::kNone}, 10, 5, std::nan("")).delta, 1);
}

TEST(MissingMass, CertificateHoldsOnRandomScores) {
  testing::Random random(testing::Seed("MissingMass.Holds"));
  for (int round = 0; round < 500; ++round) {
    std::vector<float> s = random.Normals(random.Int(2, 300), 3);
    std::sort(s.rbegin(), s.rend());
    const size_t k = random.Int(1, static_cast<uint32_t>(s.size()) - 1);
    double read = 0, rest = 0;
    for (size_t i = 0; i < s.size(); ++i) (i < k ? read : rest) += std::exp(double{s[i]});
    const MissingMass m = MissingMassOf({s[k], CutKind::kExact}, s.size() - k, std::log(read), 0);
    EXPECT_GE(m.delta, rest / (read + rest) * (1 - 1e-9));
  }
}

TEST(MissingMass, InformationLossGrowsFromZero) {
  EXPECT_EQ(InformationLoss(0, 1000), 0);
  EXPECT_NEAR(InformationLoss(0.5, 1), 2 * std::log(2.0), 1e-12);
  EXPECT_LT(InformationLoss(0.01, 1000), InformationLoss(0.02, 1000));
}

uint64_t Sum(const std::vector<uint32_t>& k) { return std::accumulate(k.begin(), k.end(), 0ull); }

TEST(AllocateTokens, SpendsTheBudgetExactlyWithinEveryLimit) {
  testing::Random random(testing::Seed("AllocateTokens"));
  for (int round = 0; round < 2000; ++round) {
    std::vector<HeadDemand> heads(random.Int(1, 40));
    uint64_t least = 0, most = 0;
    for (HeadDemand& h : heads) {
      h.missing_mass = random.Chance(0.1)    ? 0
                       : random.Chance(0.05) ? std::nan("")
                                             : random.Uniform(0, 1);
      h.k_reference = random.Int(0, 500);
      h.k_min = random.Int(0, 20);
      h.k_max = h.k_min + random.Int(0, 400);
      least += h.k_min;
      most += h.k_max;
    }
    const uint64_t total = random.Int(0, static_cast<uint32_t>(most) + 50);
    const auto k = AllocateTokens(heads, total);
    if (total < least) {
      ASSERT_FALSE(k.ok());
      EXPECT_EQ(k.error().code, Code::kInfeasible);
      continue;
    }
    ASSERT_TRUE(k.ok());
    EXPECT_EQ(Sum(*k), std::min(total, most));
    for (size_t h = 0; h < heads.size(); ++h) {
      ASSERT_GE((*k)[h], heads[h].k_min);
      ASSERT_LE((*k)[h], heads[h].k_max);
    }
  }
}

TEST(AllocateTokens, FollowsTheSquareRootOfWhatIsMissing) {
  const std::vector<HeadDemand> heads = {
      {0.4, 100, 0, 1000}, {0.1, 100, 0, 1000}, {0.0, 100, 0, 1000}};
  const auto k = AllocateTokens(heads, 300);
  ASSERT_TRUE(k.ok());
  EXPECT_EQ(*k, (std::vector<uint32_t>{200, 100, 0}));
  // A head at its limit leaves its share to the others.
  const std::vector<HeadDemand> capped = {
      {0.4, 100, 0, 150}, {0.1, 100, 10, 1000}, {0.0, 100, 5, 1000}};
  EXPECT_EQ(*AllocateTokens(capped, 300), (std::vector<uint32_t>{150, 145, 5}));
}

// No exchange of one token between two heads may lower the modelled missing mass by more than
// rounding to whole tokens explains.
TEST(AllocateTokens, NoExchangeOfTwoTokensHelps) {
  testing::Random random(testing::Seed("AllocateTokens.Optimal"));
  for (int round = 0; round < 300; ++round) {
    std::vector<HeadDemand> heads(random.Int(2, 12));
    for (HeadDemand& h : heads) h = {random.Uniform(0.01, 1), random.Int(1, 300), 1, 5000};
    const auto k = AllocateTokens(heads, 2000);
    ASSERT_TRUE(k.ok());
    const auto missing = [&](size_t h, double tokens) {
      return heads[h].missing_mass * heads[h].k_reference / tokens;
    };
    for (size_t a = 0; a < heads.size(); ++a) {
      for (size_t b = 0; b < heads.size(); ++b) {
        if (a == b || (*k)[b] < 4) continue;
        const double before = missing(a, (*k)[a]) + missing(b, (*k)[b]);
        const double after = missing(a, (*k)[a] + 2) + missing(b, (*k)[b] - 2);
        EXPECT_GE(after, before * (1 - 1e-9)) << a << " from " << b;
      }
    }
  }
}

TEST(AllocateTokens, RefusesLimitsThatCross) {
  const std::vector<HeadDemand> heads = {{0.1, 1, 5, 4}};
  EXPECT_FALSE(AllocateTokens(heads, 10).ok());
  EXPECT_TRUE(AllocateTokens({}, 10).ok());
}

}  // namespace
}  // namespace prefixd
