#include "attention/estimators/moments.h"

#include <cmath>
#include <cstring>

#include "tests/support/random_damage.h"
#include "tests/support/random_kv.h"
#include "tests/support/seed.h"
#include "tests/support/test.h"

namespace prefixd {
namespace {

using testing::OwnedRows;
using testing::Random;

struct Truth {
  std::vector<double> mean_key, key_m2, mean_value, cross;
};

Truth TwoPass(const OwnedRows& rows, uint32_t dk, uint32_t dv) {
  Truth t{std::vector<double>(dk), std::vector<double>(dk), std::vector<double>(dv),
          std::vector<double>(size_t{dk} * dv)};
  const double n = static_cast<double>(rows.count());
  for (size_t i = 0; i < rows.count(); ++i) {
    for (uint32_t j = 0; j < dk; ++j) t.mean_key[j] += rows.Key(i)[j] / n;
    for (uint32_t l = 0; l < dv; ++l) t.mean_value[l] += rows.Value(i)[l] / n;
  }
  for (size_t i = 0; i < rows.count(); ++i) {
    const std::vector<float> key = rows.Key(i), value = rows.Value(i);
    for (uint32_t j = 0; j < dk; ++j) {
      const double d = key[j] - t.mean_key[j];
      t.key_m2[j] += d * d;
      for (uint32_t l = 0; l < dv; ++l) {
        t.cross[size_t{j} * dv + l] += d * (value[l] - t.mean_value[l]);
      }
    }
  }
  return t;
}

void ExpectNear(std::span<const double> got, std::span<const double> want, double tolerance,
                const char* what) {
  ASSERT_EQ(got.size(), want.size()) << what;
  for (size_t i = 0; i < got.size(); ++i) {
    ASSERT_NEAR(got[i], want[i], tolerance) << what << " at " << i;
  }
}

TEST(MomentSummary, AddAndMergeEqualTheUnion) {
  Random random(testing::Seed("MomentSummary.Union"));
  for (int round = 0; round < 25; ++round) {
    const uint32_t dk = random.Int(1, 24), dv = random.Int(1, 24);
    const OwnedRows rows =
        testing::RandomRows(random, {dk, dv, random.AnyDType()}, random.Int(1, 700));
    const bool cross = random.Chance(0.7);
    MomentSummary whole(dk, dv, cross), pieces(dk, dv, cross);
    whole.Add(rows.view());
    for (size_t begin = 0; begin < rows.count();) {
      const size_t n = std::min<size_t>(random.Int(0, 300), rows.count() - begin);
      MomentSummary piece(dk, dv, cross);
      piece.Add(rows.view().Sub(begin, n));
      pieces.Merge(piece);
      begin += n;
    }
    const Truth t = TwoPass(rows, dk, dv);
    const double n = static_cast<double>(rows.count());
    for (const MomentSummary* summary : {&whole, &pieces}) {
      EXPECT_EQ(summary->count(), rows.count());
      ExpectNear(summary->mean_key(), t.mean_key, 1e-9, "mean key");
      ExpectNear(summary->key_m2(), t.key_m2, 1e-9 * n, "key m2");
      ExpectNear(summary->mean_value(), t.mean_value, 1e-9, "mean value");
      if (cross) ExpectNear(summary->cross(), t.cross, 2e-6 * n, "cross");
    }
  }
}

TEST(MomentSummary, EmptySetsAreNeutral) {
  Random random(testing::Seed("MomentSummary.Empty"));
  const OwnedRows rows = testing::RandomRows(random, {4, 3, DType::kF32}, 9);
  MomentSummary summary(4, 3, true);
  summary.Merge(MomentSummary(4, 3, true));
  EXPECT_EQ(summary.count(), 0u);
  summary.Add(RowsView{nullptr, 0, 0, {4, 3, DType::kF32}});
  EXPECT_EQ(summary.count(), 0u);
  summary.Add(rows.view());
  MomentSummary from_default;
  from_default.Merge(summary);
  from_default.Merge(MomentSummary());
  EXPECT_EQ(from_default.count(), 9u);
  EXPECT_EQ(from_default.key_dim(), 4u);
  ExpectNear(from_default.key_m2(), summary.key_m2(), 0, "m2");
}

TEST(MomentSummary, AMillionTokensWithAChannelOfMeanThirty) {
  // Raw float32 sums of squares gave a negative variance here (docs/mathematics.md).
  Random random(testing::Seed("MomentSummary.MeanThirty"));
  constexpr size_t kBatch = 4000, kBatches = 250;
  constexpr float kDeviation = 0.01f;
  MomentSummary summary(2, 1, false);
  for (size_t b = 0; b < kBatches; ++b) {
    OwnedRows rows({2, 1, DType::kF32}, kBatch);
    for (size_t i = 0; i < kBatch; ++i) {
      const float key[2] = {30 + kDeviation * random.Normal(), random.Normal()};
      const float value[1] = {1000};
      rows.Set(i, key, value);
    }
    summary.Add(rows.view());
  }
  EXPECT_EQ(summary.count(), kBatch * kBatches);
  EXPECT_NEAR(summary.mean_key()[0], 30, 1e-3);
  const double variance = summary.key_m2()[0] / static_cast<double>(summary.count());
  EXPECT_NEAR(variance / (kDeviation * kDeviation), 1, 0.05);
  EXPECT_NEAR(summary.mean_value()[0], 1000, 1e-9);
}

TEST(MomentSummary, IdenticalKeysHaveExactlyNoVariance) {
  OwnedRows rows({3, 2, DType::kBf16}, 1000);
  for (size_t i = 0; i < 1000; ++i) {
    rows.Set(i, std::vector<float>{30, -2, 0.5f}, std::vector<float>{static_cast<float>(i), 1});
  }
  MomentSummary summary(3, 2, true);
  for (size_t i = 0; i < 1000; i += 10) summary.Add(rows.view().Sub(i, 10));
  for (double m2 : summary.key_m2()) EXPECT_EQ(m2, 0.0);
  for (double c : summary.cross()) EXPECT_EQ(c, 0.0);
}

MomentSummary Sample(Random& random, bool cross) {
  const OwnedRows rows = testing::RandomRows(random, {6, 5, DType::kBf16}, 40);
  MomentSummary summary(6, 5, cross);
  summary.Add(rows.view());
  return summary;
}

TEST(MomentSummary, SerializedFormRoundTrips) {
  Random random(testing::Seed("MomentSummary.RoundTrip"));
  for (bool cross : {false, true}) {
    const MomentSummary summary = Sample(random, cross);
    const std::vector<std::byte> bytes = summary.Serialize();
    EXPECT_EQ(bytes.size(), size_t{24} + 4 * (6 + 6 + 5 + (cross ? 30 : 0)));
    const Result<MomentSummary> back = MomentSummary::Deserialize(bytes);
    ASSERT_TRUE(back.ok()) << back.error().message;
    EXPECT_EQ(back->count(), 40u);
    EXPECT_EQ(back->has_cross(), cross);
    for (size_t j = 0; j < 6; ++j) {
      EXPECT_EQ(back->mean_key()[j], static_cast<float>(summary.mean_key()[j]));
      EXPECT_EQ(back->key_m2()[j], static_cast<float>(summary.key_m2()[j]));
    }
    EXPECT_EQ(back->Serialize(), bytes);
  }
  for (const MomentSummary& empty : {MomentSummary(), MomentSummary(6, 5, true)}) {
    const Result<MomentSummary> back = MomentSummary::Deserialize(empty.Serialize());
    ASSERT_TRUE(back.ok());
    EXPECT_EQ(back->count(), 0u);
    EXPECT_EQ(back->key_dim(), empty.key_dim());
  }
}

void PutU32(std::vector<std::byte>& bytes, size_t at, uint32_t value) {
  std::memcpy(bytes.data() + at, &value, sizeof value);
}

TEST(MomentSummary, RefusesMalformedBytes) {
  Random random(testing::Seed("MomentSummary.Malformed"));
  const std::vector<std::byte> good = Sample(random, true).Serialize();
  const auto refused = [](std::span<const std::byte> bytes) {
    const Result<MomentSummary> result = MomentSummary::Deserialize(bytes);
    return !result.ok() && result.error().code == Code::kCorrupt;
  };
  for (size_t n = 0; n < good.size(); ++n) {
    EXPECT_TRUE(refused(std::span(good).first(n))) << "truncated to " << n;
  }
  std::vector<std::byte> bad = good;
  bad.push_back(std::byte{0});
  EXPECT_TRUE(refused(bad)) << "trailing byte";
  for (size_t at : {size_t{0}, size_t{4}, size_t{6}, size_t{8}, size_t{12}}) {
    bad = good;
    bad[at] ^= std::byte{0x22};
    EXPECT_TRUE(refused(bad)) << "header byte " << at;
  }
  bad = good;
  PutU32(bad, 8, 0xffffffffu);  // sizes whose product overflows must not allocate
  PutU32(bad, 12, 0xffffffffu);
  EXPECT_TRUE(refused(bad));
  bad = good;
  PutU32(bad, 20, 0xffffffffu);
  EXPECT_TRUE(refused(bad)) << "absurd count";
  bad = good;
  PutU32(bad, 24, 0x7fc00000u);
  EXPECT_TRUE(refused(bad)) << "NaN";
  bad = good;
  PutU32(bad, 24 + 4 * 6, 0xbf800000u);
  EXPECT_TRUE(refused(bad)) << "negative variance";
  bad = good;
  PutU32(bad, 16, 0);
  EXPECT_TRUE(refused(bad)) << "no tokens, yet moments";
}

TEST(MomentSummary, RandomDamageNeverCrashesAndIsNeverNonFinite) {
  Random random(testing::Seed("MomentSummary.Fuzz"));
  const std::vector<std::byte> good = Sample(random, true).Serialize();
  for (int round = 0; round < 20000; ++round) {
    const std::vector<std::byte> bytes = testing::Damaged(random, good, 24);
    const Result<MomentSummary> result = MomentSummary::Deserialize(bytes);
    if (!result.ok()) continue;
    for (double m2 : result->key_m2()) ASSERT_TRUE(std::isfinite(m2) && m2 >= 0);
    ASSERT_EQ(result->Serialize(), bytes);
  }
}

}  // namespace
}  // namespace prefixd
