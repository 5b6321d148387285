#include "attention/estimators/phi_cache.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "attention/reference/reference.h"
#include "tests/support/infinity.h"
#include "tests/support/random_damage.h"
#include "tests/support/random_kv.h"
#include "tests/support/seed.h"
#include "tests/support/test.h"

namespace prefixd {
namespace {

using testing::OwnedRows;
using testing::Random;

using testing::kInf;

// The cache must give sum over features of exp(log_q + m) u, and of exp(log_q + m) T.
TEST(PhiCache, MatchesItsDefinition) {
  Random random(testing::Seed("PhiCache.Definition"));
  for (int round = 0; round < 15; ++round) {
    const uint32_t dk = random.Int(2, 40), dv = random.Int(1, 40), d_phi = random.Int(1, 30);
    const FeatureMap map = testing::RandomFeatureMap(random, dk, 12, d_phi);
    const OwnedRows rows =
        testing::RandomRows(random, {dk, dv, random.AnyDType()}, random.Int(1, 900), 2);
    PhiCache cache(d_phi, dv);
    cache.Add(rows.view(), map);
    ASSERT_EQ(cache.count(), rows.count());
    // Of few rows one may outweigh the others: it is not in the sums.
    std::vector<std::vector<double>> log_phi;
    std::vector<size_t> summed;
    size_t apart = 0;
    for (size_t i = 0; i < rows.count(); ++i) {
      const bool kept_apart = std::ranges::any_of(cache.apart(), [&](const ApartRow& row) {
        return row.key == rows.Key(i) && row.value == rows.Value(i);
      });
      apart += kept_apart;
      if (kept_apart) continue;
      log_phi.push_back(reference::LogPhi(map, rows.Key(i)));
      summed.push_back(i);
    }
    ASSERT_EQ(apart, cache.apart().size());
    for (uint32_t f = 0; f < d_phi; ++f) {
      double m = -std::numeric_limits<double>::infinity(), u = 0;
      for (const auto& row : log_phi) m = std::max(m, row[f]);
      if (summed.empty()) {
        ASSERT_EQ(cache.m()[f], -kInf);
        continue;
      }
      std::vector<double> t(dv), size(dv);
      for (size_t i = 0; i < summed.size(); ++i) {
        const double w = std::exp(log_phi[i][f] - m);
        const std::vector<float> value = rows.Value(summed[i]);
        u += w;
        for (uint32_t l = 0; l < dv; ++l) t[l] += w * value[l], size[l] += w * std::abs(value[l]);
      }
      ASSERT_NEAR(cache.m()[f], m, 2e-5);
      ASSERT_NEAR(cache.u()[f], u, 3e-5 * u);
      for (uint32_t l = 0; l < dv; ++l) {
        ASSERT_NEAR(cache.t()[size_t{f} * dv + l], t[l], 4e-5 * size[l]);
      }
    }
  }
}

// Expects equality up to float32 rounding: of u and T under their shifts.
void ExpectSame(const PhiCache& a, const PhiCache& b) {
  ASSERT_EQ(a.count(), b.count());
  for (uint32_t f = 0; f < a.d_phi(); ++f) {
    ASSERT_EQ(a.m()[f], b.m()[f]) << "feature " << f;
    ASSERT_NEAR(a.u()[f], b.u()[f], 4e-6 * b.u()[f]);
    for (uint32_t l = 0; l < a.value_dim(); ++l) {
      const size_t at = size_t{f} * a.value_dim() + l;
      ASSERT_NEAR(a.t()[at], b.t()[at], 2e-5 * b.u()[f]) << "feature " << f;
    }
  }
}

TEST(PhiCache, MergeEqualsBuildingOverTheUnion) {
  Random random(testing::Seed("PhiCache.Merge"));
  for (int round = 0; round < 30; ++round) {
    const uint32_t dk = random.Int(2, 20), dv = random.Int(1, 20), d_phi = random.Int(1, 20);
    const FeatureMap map = testing::RandomFeatureMap(random, dk, 8, d_phi);
    const OwnedRows rows = testing::RandomRows(random, {dk, dv, DType::kBf16}, 600, 3);
    PhiCache whole(d_phi, dv), merged(d_phi, dv);
    whole.Add(rows.view(), map);
    for (size_t begin = 0; begin < rows.count();) {
      const size_t n = std::min<size_t>(random.Int(0, 250), rows.count() - begin);
      PhiCache piece(d_phi, dv);
      piece.Add(rows.view().Sub(begin, n), map);
      merged.Merge(piece);
      begin += n;
    }
    ExpectSame(merged, whole);
  }
}

TEST(PhiCache, EmptySetsAreNeutralAndMakeNoNaN) {
  Random random(testing::Seed("PhiCache.Empty"));
  const FeatureMap map = testing::RandomFeatureMap(random, 4, 4, 5);
  const OwnedRows rows = testing::RandomRows(random, {4, 3, DType::kF16}, 20);
  PhiCache empty(5, 3), cache(5, 3);
  EXPECT_EQ(empty.m()[0], -kInf);
  empty.Merge(PhiCache(5, 3));
  EXPECT_EQ(empty.m()[4], -kInf);
  EXPECT_EQ(empty.u()[4], 0);
  cache.Add(rows.view(), map);
  PhiCache both = empty;
  both.Merge(cache);
  both.Merge(PhiCache());
  ExpectSame(both, cache);
}

TEST(PhiCache, FeaturesOfNoTokenStayEmptyThroughAMerge) {
  Random random(testing::Seed("PhiCache.NoToken"));
  const OwnedRows rows = testing::RandomRows(random, {4, 2, DType::kF32}, 2);
  PhiCache a(2, 2), b(2, 2);
  a.AddFeatures(rows.view(), std::vector<float>{1, -kInf, 2, -kInf});
  EXPECT_EQ(a.m()[1], -kInf);
  EXPECT_EQ(a.u()[1], 0);
  b.AddFeatures(rows.view(), std::vector<float>{-kInf, -kInf, -kInf, 3});
  a.Merge(b);
  EXPECT_EQ(a.m()[0], 2);
  EXPECT_EQ(a.m()[1], 3);
  EXPECT_NEAR(a.u()[0], 1 + std::exp(-1.0), 1e-6);
  EXPECT_EQ(a.u()[1], 1);
  for (float t : a.t()) EXPECT_TRUE(std::isfinite(t));
}

TEST(PhiCache, MillionsOfNatsApartDoNotOverflow) {
  Random random(testing::Seed("PhiCache.Range"));
  const OwnedRows rows = testing::RandomRows(random, {4, 2, DType::kF32}, 3);
  PhiCache cache(1, 2);
  cache.AddFeatures(rows.view(), std::vector<float>{-1e6f, 2e6f, 0});
  EXPECT_EQ(cache.m()[0], 2e6f);
  EXPECT_EQ(cache.u()[0], 1);
  EXPECT_NEAR(cache.t()[0], rows.Value(1)[0], 1e-6);
}

PhiCache Sample(Random& random) {
  const FeatureMap map = testing::RandomFeatureMap(random, 6, 8, 7);
  const OwnedRows rows = testing::RandomRows(random, {6, 5, DType::kBf16}, 40);
  PhiCache cache(7, 5);
  cache.Add(rows.view(), map);
  return cache;
}

TEST(PhiCache, SerializedFormRoundTrips) {
  Random random(testing::Seed("PhiCache.RoundTrip"));
  for (const PhiCache& cache : {Sample(random), PhiCache(7, 5), PhiCache()}) {
    const std::vector<std::byte> bytes = cache.Serialize();
    EXPECT_EQ(bytes.size(), 32 + 4 * size_t{cache.d_phi()} * (cache.value_dim() + 2));
    const Result<PhiCache> back = PhiCache::Deserialize(bytes);
    ASSERT_TRUE(back.ok()) << back.error().message;
    EXPECT_EQ(back->count(), cache.count());
    EXPECT_EQ(back->Serialize(), bytes);
  }
}

void PutWord(std::vector<std::byte>& bytes, size_t at, uint32_t value) {
  std::memcpy(bytes.data() + at, &value, sizeof value);
}

TEST(PhiCache, RefusesMalformedBytes) {
  Random random(testing::Seed("PhiCache.Malformed"));
  const std::vector<std::byte> good = Sample(random).Serialize();
  const auto refused = [](std::span<const std::byte> bytes) {
    const Result<PhiCache> result = PhiCache::Deserialize(bytes);
    return !result.ok() && result.error().code == Code::kCorrupt;
  };
  for (size_t n = 0; n < good.size(); ++n) {
    EXPECT_TRUE(refused(std::span(good).first(n))) << "truncated to " << n;
  }
  const struct {
    size_t at;
    uint32_t value;
    const char* what;
  } edits[] = {
      {0, 0x12345678u, "magic"},
      {4, 1, "version"},
      {4, 0x00010002u, "flags"},
      {8, 0xffffffffu, "d_phi"},
      {12, 0, "value_dim"},
      {16, 0, "no tokens, yet mass"},
      {20, 0xffffu, "absurd count"},
      {24, 1, "a row kept apart that is not there"},
      {28, 6, "keys of no rows"},
      {32, 0x7fc00000u, "m is NaN"},
      {32, 0x7f800000u, "m is +inf"},
      {32, 0xff800000u, "m is -inf but u is not 0"},
      {32 + 28, 0x00000000u, "u is 0 but m is not -inf"},
      {32 + 28, 0x42280000u, "u of 42 by 40 tokens"},
      {32 + 28, 0xbf800000u, "u is negative"},
      {32 + 56, 0xff800000u, "T is infinite"},
  };
  for (const auto& edit : edits) {
    std::vector<std::byte> bad = good;
    PutWord(bad, edit.at, edit.value);
    EXPECT_TRUE(refused(bad)) << edit.what;
  }
}

TEST(PhiCache, RandomDamageNeverCrashesAndIsNeverNonFinite) {
  Random random(testing::Seed("PhiCache.Fuzz"));
  const std::vector<std::byte> good = Sample(random).Serialize();
  for (int round = 0; round < 20000; ++round) {
    const std::vector<std::byte> bytes = testing::Damaged(random, good, 32);
    const Result<PhiCache> result = PhiCache::Deserialize(bytes);
    if (!result.ok()) continue;
    for (float t : result->t()) ASSERT_TRUE(std::isfinite(t));
    for (float u : result->u()) ASSERT_TRUE(std::isfinite(u) && u >= 0);
    ASSERT_EQ(result->Serialize(), bytes);
  }
}

}  // namespace
}  // namespace prefixd
