#include "attention/estimators/feature_map.h"

#include <cmath>

#include "attention/reference/reference.h"
#include "tests/support/random_kv.h"
#include "tests/support/seed.h"
#include "tests/support/test.h"

namespace prefixd {
namespace {

TEST(FeatureMap, LogPhiMatchesTheReference) {
  testing::Random random(testing::Seed("FeatureMap.LogPhi"));
  for (int round = 0; round < 60; ++round) {
    const FeatureMap map = testing::RandomFeatureMap(random, random.Int(1, 140), random.Int(1, 100),
                                                     random.Int(1, 140));
    ASSERT_TRUE(map.Validate().ok());
    const size_t n = random.Int(0, 130);
    const std::vector<float> x = random.Normals(n * map.in_dim, 2);
    std::vector<float> out(n * map.d_phi);
    map.LogPhi(x, n, out);
    for (size_t i = 0; i < n; i += 1 + n / 5) {
      const std::vector<double> want =
          reference::LogPhi(map, std::span(x).subspan(i * map.in_dim, map.in_dim));
      for (uint32_t f = 0; f < map.d_phi; ++f) {
        ASSERT_NEAR(out[i * map.d_phi + f], want[f], 1e-5) << "row " << i << " feature " << f;
      }
    }
  }
}

TEST(FeatureMap, OneNumberByHand) {
  FeatureMap map;
  map.in_dim = map.d_emb = map.d_phi = 1;
  map.w_in = {2}, map.b_in = {1}, map.w1 = {1}, map.b1 = {0}, map.w2 = {3}, map.b2 = {0.5f};
  map.w_out = {2}, map.b_out = {-1}, map.alpha = 0.5f;
  // g0 = 2 * 0.5 + 1 = 2; GELU(2) = 2 Phi(2) = 1.954499736; h = 6.363499208;
  // g1 = 2 + 3.181749604; log phi = 2 g1 - 1.
  float out = 0;
  const float x = 0.5f;
  map.LogPhi(std::span(&x, 1), 1, std::span(&out, 1));
  EXPECT_NEAR(out, 9.363499208, 2e-6);
}

TEST(FeatureMap, ValidateRefusesWrongSizesAndBadWeights) {
  testing::Random random(testing::Seed("FeatureMap.Validate"));
  const FeatureMap good = testing::RandomFeatureMap(random, 8, 6, 4);
  FeatureMap bad = good;
  bad.w1.pop_back();
  ASSERT_FALSE(bad.Validate().ok());
  EXPECT_NE(bad.Validate().error().message.find("w1"), std::string::npos);
  bad = good;
  bad.b_out[2] = std::nanf("");
  ASSERT_FALSE(bad.Validate().ok());
  EXPECT_NE(bad.Validate().error().message.find("b_out"), std::string::npos);
  bad = good;
  bad.alpha = INFINITY;
  EXPECT_FALSE(bad.Validate().ok());
  EXPECT_FALSE(FeatureMap{}.Validate().ok());
}

TEST(FeatureMapSet, ValidateAgainstAGeometry) {
  testing::Random random(testing::Seed("FeatureMapSet.Validate"));
  const KvGeometry geometry{2, 4, 2, 8, 8, DType::kBf16, {{1, 0, 0}, {1, 0, 0}}};
  FeatureMapSet set;
  set.length = 512;
  set.d_phi = 4;
  for (int i = 0; i < 8; ++i) set.phi_q.push_back(testing::RandomFeatureMap(random, 8, 6, 4));
  for (int i = 0; i < 4; ++i) set.phi_k.push_back(testing::RandomFeatureMap(random, 8, 6, 4));
  ASSERT_TRUE(set.Validate(geometry).ok());
  FeatureMapSet bad = set;
  bad.phi_q.pop_back();
  EXPECT_FALSE(bad.Validate(geometry).ok());
  bad = set;
  bad.phi_k[3] = testing::RandomFeatureMap(random, 9, 6, 4);
  ASSERT_FALSE(bad.Validate(geometry).ok());
  EXPECT_NE(bad.Validate(geometry).error().message.find("phi_k of layer 1, head 1"),
            std::string::npos);
  bad = set;
  bad.phi_q[0].w_in[0] = std::nanf("");
  EXPECT_FALSE(bad.Validate(geometry).ok());
}

}  // namespace
}  // namespace prefixd
