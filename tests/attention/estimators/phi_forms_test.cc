// Tests the phi estimator's two subtraction forms, its bf16 caches, and features that are read
// where they are stored.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>

#include "attention/step/budget.h"
#include "prefixd/estimator_variant.h"
#include "tests/attention/step_fixture.h"
#include "tests/support/seed.h"
#include "tests/support/test.h"

namespace prefixd {
namespace {

using testing::Random;
using testing::RandomCase;
using testing::StepCase;

constexpr float kNothing = -std::numeric_limits<float>::infinity();

struct FormEstimates {
  std::vector<float> log_z, y;
};

FormEstimates Evaluate(const GroupStepInput& in, uint32_t value_dim) {
  FormEstimates out{std::vector<float>(in.group), std::vector<float>(size_t{in.group} * value_dim)};
  const Status status = EstimateRemainder(in, out.log_z, out.y);
  EXPECT_TRUE(status.ok()) << (status.ok() ? "" : status.error().message);
  return out;
}

StepCase PhiCase(Random& random, uint32_t n, uint32_t k) {
  StepCase c = RandomCase(random, n, {16, 8, DType::kBf16}, {2, 4}, 3, 1);
  c.BuildPhi(random, 8, 12);
  c.Retrieve(testing::RandomSubset(random, c.parts.mid.begin, c.parts.mid.end, k));
  return c;
}

// Returns the smallest share of the surrogate mass that is left, over the group.
double Share(const StepCase& c) {
  double share = 1;
  for (uint32_t g = 0; g < c.group; ++g) {
    share = std::min(
        share, reference::EstimatePhi(c.Input(EstimatorKind::kPhi), g, PhiForm::kSigned).share);
  }
  return share;
}

// Returns the largest difference of log Z between the two forms, over cases that leave between low
// and high of the mass.
double FormDifference(Random& random, bool bf16, double low, double high) {
  double worst = 0;
  int cases = 0;
  for (int round = 0; round < 400 && cases < 60; ++round) {
    StepCase c = PhiCase(random, 120, random.Int(0, 113));
    const double share = Share(c);
    if (share < low || share > high) continue;
    ++cases;
    if (bf16) c.phi = c.phi.RoundedToBf16();
    GroupStepInput in = c.Input(EstimatorKind::kPhi);
    const FormEstimates a = Evaluate(in, 8);
    in.phi_form = PhiForm::kPerFeature;
    const FormEstimates b = Evaluate(in, 8);
    for (uint32_t g = 0; g < c.group; ++g) {
      worst = std::max(worst, double{std::abs(a.log_z[g] - b.log_z[g])});
    }
  }
  EXPECT_GE(cases, 20);
  return worst;
}

// Where no feature is clamped both forms are the same sum. A float32 cache clamps nothing while a
// feature keeps more than rounding. A bf16 cache is off by up to 2^-8 of each u[f], so some
// features turn negative once little is left: the parity form clamps these, and the signed form
// lets them cancel against the others.
TEST(PhiForms, AgreeInFloat32AndDifferInBf16OnlyWhereLittleIsLeft) {
  Random random(testing::Seed("PhiForms.Agree"));
  const double f32_much = FormDifference(random, false, 0.5, 1);
  const double f32_little = FormDifference(random, false, 0.01, 0.1);
  const double bf16_much = FormDifference(random, true, 0.5, 1);
  const double bf16_little = FormDifference(random, true, 0.01, 0.1);
  std::printf(
      "[ INFO     ] |difference of log Z|: float32 %.1e (half left or more), %.1e (a tenth "
      "or less); bf16 %.1e, %.1e\n",
      f32_much, f32_little, bf16_much, bf16_little);
  EXPECT_LT(f32_much, 1e-5);
  EXPECT_LT(f32_little, 1e-2);
  EXPECT_LT(bf16_much, 1e-5);
  EXPECT_LT(bf16_little, 1);
}

// bf16 costs up to 2^-8 of the mass, amplified by what was retrieved.
TEST(PhiForms, Bf16CachesAreOffByTheirRoundingOverTheShareLeft) {
  Random random(testing::Seed("PhiForms.Bf16"));
  for (int round = 0; round < 200; ++round) {
    StepCase c = PhiCase(random, 150, random.Int(0, 100));
    const double share = Share(c);
    if (share < 0.05) continue;
    const FormEstimates exact = Evaluate(c.Input(EstimatorKind::kPhi), 8);
    c.phi = c.phi.RoundedToBf16();
    EXPECT_EQ(c.phi.bytes(), 12 * 4 + 12 * (1 + 8) * 2u);
    const auto read = PhiCache::Deserialize(c.phi.Serialize());
    ASSERT_TRUE(read.ok()) << read.error().message;
    EXPECT_EQ(read->dtype(), DType::kBf16);
    c.phi = *read;
    const FormEstimates rounded = Evaluate(c.Input(EstimatorKind::kPhi), 8);
    for (uint32_t g = 0; g < c.group; ++g) {
      EXPECT_NEAR(exact.log_z[g], rounded.log_z[g], 1.2 * 0x1p-8 / share + 1e-5);
    }
  }
}

TEST(PhiForms, EverythingRetrievedLeavesNothingInEitherForm) {
  Random random(testing::Seed("PhiForms.All"));
  StepCase c = PhiCase(random, 80, 74);
  for (PhiForm form : {PhiForm::kSigned, PhiForm::kPerFeature}) {
    GroupStepInput in = c.Input(EstimatorKind::kPhi);
    in.phi_form = form;
    testing::StepOutput out = c.Buffers();
    ASSERT_TRUE(GroupStep(in, out.spans()).ok());
    for (float rho : out.rho_z) EXPECT_EQ(rho, 0);
  }
  // The summary has one token more than was retrieved, without mass: rounding noise counts as none.
  GroupStepInput in = c.Input(EstimatorKind::kPhi);
  PhiCache more(12, 8);
  more.Add(c.Mid(), c.phi_k);
  std::vector<float> nothing(12, -300.0f);
  more.AddFeatures(c.Mid().Sub(0, 1), nothing);
  in.phi = &more;
  in.mid_count = more.count();
  for (PhiForm form : {PhiForm::kSigned, PhiForm::kPerFeature}) {
    in.phi_form = form;
    testing::StepOutput out = c.Buffers();
    ASSERT_TRUE(GroupStep(in, out.spans()).ok());
    for (float rho : out.rho_z) EXPECT_EQ(rho, 0);
    for (float y : out.y) EXPECT_TRUE(std::isfinite(y));
  }
}

// ---- stored features ---------------------------------------------------------------------------

const FeatureFormat kFormats[] = {{8, FeatureScale::kLinear},
                                  {8, FeatureScale::kLog},
                                  {16, FeatureScale::kLinear},
                                  {16, FeatureScale::kLog}};

TEST(StoredFeatures, ComeBackWithinTheStatedError) {
  Random random(testing::Seed("StoredFeatures.Error"));
  const uint32_t d_phi = 7;
  std::vector<float> m = random.Normals(d_phi, 20);
  m[3] = kNothing;
  std::vector<float> log_phi(d_phi * 3000);
  for (size_t i = 0; i < log_phi.size(); ++i) {
    const float base = std::isfinite(m[i % d_phi]) ? m[i % d_phi] : 0.0f;
    log_phi[i] = base - static_cast<float>(random.Uniform(0, 1) < 0.01 ? random.Uniform(-1e-6, 0)
                                                                       : random.Uniform(0, 80));
  }
  for (const FeatureFormat& format : kFormats) {
    std::vector<std::byte> codes(format.RowBytes(d_phi) * 3000);
    EncodeFeatures(format, log_phi, m, codes);
    std::vector<float> weights(log_phi.size());
    DecodeFeatures(format, codes.data(), weights);
    for (size_t i = 0; i < weights.size(); ++i) {
      if (!std::isfinite(m[i % d_phi])) {
        ASSERT_EQ(weights[i], 0);
        continue;
      }
      const double relative = std::min(0.0, double{log_phi[i]} - m[i % d_phi]);
      if (format.scale == FeatureScale::kLinear) {
        ASSERT_NEAR(weights[i], std::exp(relative), format.error() * 1.001 + 1e-7);
      } else if (relative < -format.range() - format.error()) {
        ASSERT_EQ(weights[i], 0) << relative;
      } else {
        ASSERT_NEAR(std::log(weights[i]), relative, format.error() * 1.001 + 2e-6);
      }
    }
  }
}

// Holds codes of the mid region in two chunks, each relative to its own m.
struct Stored {
  std::vector<float> m;
  std::vector<std::byte> codes;
  std::vector<uint32_t> chunks;
  PhiCache consistent;  // built from the codes

  Stored(const StepCase& c, const FeatureFormat& format) {
    const uint32_t d_phi = c.phi_k.d_phi;
    const size_t n = c.Mid().count, half = n / 2, row = format.RowBytes(d_phi);
    codes.resize(n * row);
    consistent = PhiCache(d_phi, c.shape().value_dim);
    for (const auto& [begin, count] : {std::pair{size_t{0}, half}, {half, n - half}}) {
      const RowsView part = c.Mid().Sub(begin, count);
      PhiCache chunk(d_phi, c.shape().value_dim);
      chunk.Add(part, c.phi_k);
      std::vector<float> log_phi(count * d_phi), key(part.shape.key_dim), weights(count * d_phi);
      for (size_t i = 0; i < count; ++i) {
        ToFloat(part.shape.dtype, part.key(i), key);
        c.phi_k.LogPhi(key, 1, std::span(log_phi).subspan(i * d_phi, d_phi));
      }
      const auto out = std::span(codes).subspan(begin * row, count * row);
      EncodeFeatures(format, log_phi, chunk.m(), out);
      DecodeFeatures(format, out.data(), weights);
      for (size_t i = 0; i < weights.size(); ++i) {
        weights[i] = chunk.m()[i % d_phi] + std::log(weights[i]);
      }
      consistent.AddFeatures(part, weights);
      m.insert(m.end(), chunk.m().begin(), chunk.m().end());
      chunks.insert(chunks.end(), count, begin == 0 ? 0u : 1u);
    }
  }
};

TEST(StoredFeatures, StepsReadThemInsteadOfRecomputing) {
  Random random(testing::Seed("StoredFeatures.Step"));
  for (int round = 0; round < 60; ++round) {
    StepCase c = PhiCase(random, 140, random.Int(1, 60));
    if (Share(c) < 0.3) continue;
    for (const FeatureFormat& format : kFormats) {
      const Stored stored(c, format);
      const size_t row = format.RowBytes(12);
      std::vector<std::byte> picked(c.ids.size() * row);
      std::vector<uint32_t> chunks;
      for (size_t i = 0; i < c.ids.size(); ++i) {
        const size_t at = c.ids[i] - c.parts.mid.begin;
        std::memcpy(picked.data() + i * row, stored.codes.data() + at * row, row);
        chunks.push_back(stored.chunks[at]);
      }
      const FormEstimates recomputed = Evaluate(c.Input(EstimatorKind::kPhi), 8);
      GroupStepInput in = c.Input(EstimatorKind::kPhi);
      in.phi_k = nullptr;  // not needed any more
      in.features = {format, picked.data(), row, stored.m, chunks};
      const FormEstimates read = Evaluate(in, 8);
      // Rounded features leave a cache of unrounded ones: the codes' error, over the share left.
      const double error = format.scale == FeatureScale::kLinear
                               ? format.error() * 12 * static_cast<double>(c.ids.size())
                               : format.error() + 1e-6;
      for (uint32_t g = 0; g < c.group; ++g) {
        if (error < 0.05) {
          EXPECT_NEAR(read.log_z[g], recomputed.log_z[g], 5 * error / 0.3 + 1e-4);
        }
      }
      // A cache built from the codes themselves leaves float32 rounding alone: retrieving all but
      // one token leaves exactly that token's surrogate mass.
      in.phi = &stored.consistent;
      const FormEstimates consistent = Evaluate(in, 8);
      std::vector<uint32_t> rest;
      PhiCache left(12, 8);
      for (uint32_t i = 0; i < c.parts.mid.size(); ++i) {
        const uint32_t token = c.parts.mid.begin + i;
        if (std::find(c.ids.begin(), c.ids.end(), token) != c.ids.end()) continue;
        std::vector<float> weights(12);
        DecodeFeatures(format, stored.codes.data() + i * row, weights);
        for (uint32_t f = 0; f < 12; ++f) {
          weights[f] = stored.m[stored.chunks[i] * 12 + f] + std::log(weights[f]);
        }
        left.AddFeatures(c.Mid().Sub(i, 1), weights);
      }
      GroupStepInput direct = c.Input(EstimatorKind::kPhi);
      direct.retrieved = {};
      direct.phi = &left;
      direct.mid_count = left.count();
      const FormEstimates want = Evaluate(direct, 8);
      for (uint32_t g = 0; g < c.group; ++g) {
        EXPECT_NEAR(consistent.log_z[g], want.log_z[g], 2e-4) << int{format.bits};
        for (int l = 0; l < 8; ++l) {
          EXPECT_NEAR(consistent.y[g * 8 + l], want.y[g * 8 + l], 2e-3);
        }
      }
    }
  }
}

TEST(StoredFeatures, AreChargedPerRetrievedToken) {
  const RowShape row{128, 128, DType::kBf16};
  EXPECT_NEAR(FeatureTokens(row, 128, 8), 0.25, 1e-12);
  EXPECT_NEAR(FeatureTokens(row, 128, 16), 0.5, 1e-12);
  const auto plain = PlanBudget(16384, {}, 0.01, 66);
  const auto stored = PlanBudget(16384, {}, 0.01, 66, 1, 1 + FeatureTokens(row, 128, 8));
  ASSERT_TRUE(plain.ok() && stored.ok());
  EXPECT_EQ(plain->k, 78u);
  EXPECT_EQ(stored->k, 62u);
  EXPECT_FALSE(PlanBudget(16384, {}, 0.01, 66, 1, 0.5).ok());
}

TEST(StoredFeatures, RefuseShapesThatDoNotFit) {
  Random random(testing::Seed("StoredFeatures.Refuse"));
  StepCase c = PhiCase(random, 60, 5);
  const std::vector<std::byte> codes(5 * 12);
  const std::vector<float> m(12);
  const std::vector<uint32_t> chunks(5, 3);
  GroupStepInput in = c.Input(EstimatorKind::kPhi);
  testing::StepOutput out = c.Buffers();
  in.features = {{8, FeatureScale::kLinear}, codes.data(), 12, m, chunks};
  EXPECT_FALSE(GroupStep(in, out.spans()).ok()) << "a chunk that has no m";
  in.features.chunks = {};
  EXPECT_TRUE(GroupStep(in, out.spans()).ok());
  in.features.stride = 3;
  EXPECT_FALSE(GroupStep(in, out.spans()).ok()) << "rows that overlap";
  in.features.stride = 12;
  in.features.format.bits = 4;
  EXPECT_FALSE(GroupStep(in, out.spans()).ok()) << "no such width";
}

}  // namespace
}  // namespace prefixd
