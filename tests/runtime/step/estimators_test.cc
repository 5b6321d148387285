// Tests every estimator through the whole runtime: those by clusters, those fixed per head, a
// step's report of its missing mass, and tokens spread by missing mass.
#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>

#include "attention/estimators/clusters.h"
#include "base/every_page.h"
#include "runtime/step/adaptive_budget.h"
#include "tests/runtime/runtime_fixture.h"

namespace prefixd::testing {
namespace {

class EstimatorsTest : public RuntimeTest {
 protected:
  EstimatorsTest() { Use("none, moment, moment/r4, moment/full/cov, centroid, scan"); }

  void Use(const char* list) {
    auto variants = ParseVariants(list);
    EXPECT_TRUE(variants.ok());
    options_.estimators = *std::move(variants);
  }
  static EstimatorVariant Variant(const char* name) { return *EstimatorVariant::Parse(name); }

  static StepPolicy Policy(const EstimatorVariant& estimator, uint32_t k) {
    StepPolicy policy;
    policy.estimator = estimator;
    policy.k = k;
    policy.selector = "exact";
    return policy;
  }
  Output Full(const SyntheticPrompt& prompt, uint32_t layer, std::span<const float> q) {
    StepPolicy full;
    full.mode = StepMode::kFull;
    const auto session = Attach(prompt, full);
    return Step(*session, layer, q);
  }
};

// With a cluster for every token nothing is left to estimate.
TEST_F(EstimatorsTest, ClustersOfOneTokenAreExact) {
  const uint64_t seed = Seed("ClustersOfOneTokenAreExact");
  options_.clusters = 128;
  Open();
  const auto prompt = MakePrompt(spec_.geometry, 90, seed);
  ASSERT_NE(PutReady(prompt), "");
  for (const char* name : {"centroid", "scan"}) {
    for (const uint32_t k : {0u, 1u, 20u}) {
      SCOPED_TRACE(std::string(name) + ", K = " + std::to_string(k));
      const auto session = Attach(prompt, Policy(Variant(name), k));
      ASSERT_TRUE(session);
      const auto q = prompt.Q(1, 80 + k / 4, 1);
      const Output got = Step(*session, 1, q), want = Full(prompt, 1, q);
      for (size_t g = 0; g < 4; ++g) EXPECT_NEAR(got.lse[g], want.lse[g], 1e-3);
      for (size_t i = 0; i < got.y.size(); ++i) EXPECT_NEAR(got.y[i], want.y[i], 1e-3);
      EXPECT_GT(got.info.rho_z[0], 0);
      const auto report = *session->report();
      EXPECT_GT(report.total.summary_bytes[size_t(Variant(name).kind)], 0u);
    }
  }
}

// A chain of segments has several clusterings; a scan's mass is exact with any clusters.
TEST_F(EstimatorsTest, ChainsAreClusteredAsOne) {
  const uint64_t seed = Seed("ChainsAreClusteredAsOne");
  options_.clusters = 8;
  Open();
  const auto whole = MakePrompt(spec_.geometry, 712, seed);
  for (const uint32_t end : {300u, 307u, 308u, 700u, 712u}) {
    ASSERT_NE(PutReady(MakePrompt(spec_.geometry, end, seed)), "");
  }
  for (const uint32_t n : {712u, 700u, 650u, 320u, 309u, 30u}) {
    SCOPED_TRACE(n);
    auto session =
        store_->Attach({spec_.name, "", whole.tokens, "", n, Policy(EstimatorKind::kScan, 16)});
    ASSERT_OK(session);
    auto full = store_->Attach({spec_.name, "", whole.tokens, "", n, {.mode = StepMode::kFull}});
    ASSERT_OK(full);
    const auto q = whole.Q(0, 711, 1);
    const Output got = Step(**session, 0, q), want = Step(**full, 0, q);
    for (size_t g = 0; g < 4; ++g) EXPECT_NEAR(got.lse[g], want.lse[g], 1e-3);
    const uint32_t mid = Partition::Of(n, options_.anchors).mid.size();
    for (const char* name : {"scan", "centroid"}) {
      const auto bytes = (*session)->SummaryBytes(0, 1, Variant(name));
      ASSERT_OK(bytes);
      const auto clusters = ClusterSummary::Deserialize(*bytes);
      ASSERT_OK(clusters);
      EXPECT_EQ(clusters->count(), mid);
      EXPECT_LE(clusters->size(), 8u);
      ASSERT_OK((*session)->SetPolicy(Policy(Variant(name), 16)));
      const Output out = Step(**session, 0, q);
      ASSERT_OK((*session)->SetPolicy(Policy(EstimatorKind::kNone, 16)));
      const Output none = Step(**session, 0, q);
      double by_clusters = 0, by_none = 0;
      for (size_t g = 0; g < 4; ++g) {
        by_clusters += std::abs(out.lse[g] - want.lse[g]);
        by_none += std::abs(none.lse[g] - want.lse[g]);
      }
      if (mid > 16) {
        EXPECT_LT(by_clusters, by_none) << name;
      }
    }
  }
}

// With codes, too, the scan's mass is that of the keys, although few of them are read.
TEST_F(EstimatorsTest, ScansByCodes) {
  const uint64_t seed = Seed("ScansByCodes");
  options_.build_codes = options_.build_ivf = true;
  options_.codes_min_tokens = options_.ivf_min_tokens = 1024;
  options_.recall_target = 0.5;  // random keys are the hardest case
  Open();
  const auto prompt = MakePrompt(spec_.geometry, 3000, seed);
  ASSERT_NE(PutReady(prompt), "");
  StepPolicy policy = Policy(EstimatorKind::kScan, 30);
  const auto by_keys = Attach(prompt, policy);
  policy.selector = "codes";
  policy.report_missing = true;
  const auto by_codes = Attach(prompt, policy);
  policy.estimator = EstimatorKind::kNone;
  const auto none = Attach(prompt, policy);
  ASSERT_TRUE(by_keys && by_codes && none);
  EXPECT_EQ(by_codes->info().estimator, "scan");
  double lse_error = 0, keys_error = 0, codes_error = 0, none_error = 0;
  const uint32_t steps = 24;
  for (uint32_t t = 3000 - steps; t < 3000; ++t) {
    const auto q = prompt.Q(1, t, 1);
    const Output want = Full(prompt, 1, q), keys = Step(*by_keys, 1, q),
                 codes = Step(*by_codes, 1, q), without = Step(*none, 1, q);
    EXPECT_EQ(codes.info.ledger.retrieved_tokens, 60u);
    EXPECT_LT(codes.info.ledger.scan_bytes, keys.info.ledger.scan_bytes);
    for (size_t g = 0; g < 4; ++g) {
      lse_error += (codes.lse[g] - want.lse[g]) / (4.0 * steps);
      EXPECT_GT(codes.info.rho_z[g], 0);
      EXPECT_FALSE(codes.info.missing[g].certified);
    }
    for (size_t i = 0; i < want.y.size(); ++i) {
      keys_error += std::abs(keys.y[i] - want.y[i]);
      codes_error += std::abs(codes.y[i] - want.y[i]);
      none_error += std::abs(without.y[i] - want.y[i]);
    }
  }
  EXPECT_LT(std::abs(lse_error), 0.03);
  EXPECT_LT(codes_error, 1.5 * keys_error);
  EXPECT_LT(codes_error, 0.8 * none_error);

  // First most tokens are retrieved, so keys are searched exactly; then all, so nothing is
  // estimated.
  policy.estimator = EstimatorKind::kScan;
  for (const uint32_t k : {2900u, 2980u}) {
    policy.k = k;
    ASSERT_OK(by_codes->SetPolicy(policy));
    const auto q = prompt.Q(0, 2999, 1);
    const Output got = Step(*by_codes, 0, q), want = Full(prompt, 0, q);
    for (size_t g = 0; g < 4; ++g) {
      EXPECT_NEAR(got.lse[g], want.lse[g], 1e-3);
      if (k == 2980) {
        EXPECT_EQ(got.info.rho_z[g], 0);
      }
    }
  }
  // A selector that scores too few keys cannot serve a scan, and the info tells why.
  policy.k = 30;
  policy.selector = "ivf";
  const auto by_lists = Attach(prompt, policy);
  ASSERT_TRUE(by_lists);
  const std::string why =
      "moment in place of scan, for which selector ivf scores too few keys (use codes or exact)";
  EXPECT_EQ(by_lists->info().estimator, why);
  // The info also lists fixed heads, and explains a fixed scan that cannot be served.
  policy.fixed = {{0, 1, EstimatorKind::kNone}};
  EXPECT_EQ(Attach(prompt, policy)->info().estimator, "chosen per head: none 1, moment 3; " + why);
  policy.estimator = EstimatorKind::kNone;
  policy.fixed = {{1, 0, EstimatorKind::kScan}};
  EXPECT_EQ(Attach(prompt, policy)->info().estimator, "chosen per head: none 3, moment 1; " + why);
  policy.selector = "codes";
  EXPECT_EQ(Attach(prompt, policy)->info().estimator, "chosen per head: none 3, scan 1");
}

TEST_F(EstimatorsTest, WhatIsNotBuiltIsSaid) {
  Use("none, moment");
  Open();
  const auto prompt = MakePrompt(spec_.geometry, 300, 1);
  ASSERT_NE(PutReady(prompt), "");
  for (const char* name : {"moment/r2", "moment/cov", "centroid", "scan"}) {
    const auto refused =
        store_->Attach({spec_.name, "", prompt.tokens, "", 0, Policy(Variant(name), 10)});
    EXPECT_CODE(refused, Code::kFailedPrecondition);
    EXPECT_NE(refused.error().message.find("none, moment"), std::string::npos);
  }
  // With another configuration the store builds what is missing.
  Use("none, moment, moment/r2, scan");
  Open();
  const auto session = [&] {
    EXPECT_TRUE(store_->WaitReady(EveryPrefix(*store_).value().at(0).id, nullptr).ok());
    return Attach(prompt, Policy(Variant("moment/r2"), 10));
  }();
  ASSERT_TRUE(session);
  EXPECT_EQ(session->info().estimator, "moment/r2");
  ASSERT_OK(session->SetPolicy(Policy(EstimatorKind::kScan, 10)));
}

TEST_F(EstimatorsTest, HeadsCanBeFixed) {
  Open();
  const auto prompt = MakePrompt(spec_.geometry, 400, 2);
  ASSERT_NE(PutReady(prompt), "");
  StepPolicy policy;
  policy.budget = 0.4;
  policy.fixed = {{0, 1, EstimatorKind::kNone}, {1, 0, Variant("moment/r4")}};
  const auto session = Attach(prompt, policy);
  ASSERT_TRUE(session);
  const Output out = Step(*session, 0, prompt.Q(0, 399, 1));
  EXPECT_TRUE(std::isnan(out.info.rho_z[2]) && std::isnan(out.info.rho_z[3]));
  EXPECT_NE(session->info().estimator.find("moment/r4"), std::string::npos);
  policy.fixed = {{2, 0, EstimatorKind::kNone}};
  EXPECT_CODE(session->SetPolicy(policy), Code::kInvalidArgument);
  policy.fixed.assign(5, {0, 0, EstimatorKind::kNone});  // the model has four heads
  EXPECT_CODE(session->SetPolicy(policy), Code::kInvalidArgument);
}

// Under an exact cut the bound holds; every estimator reports missing mass, and so does none.
TEST_F(EstimatorsTest, MissingMassIsCertifiedUnderExactCuts) {
  const uint64_t seed = Seed("MissingMassIsCertified");
  Open();
  const auto prompt = MakePrompt(spec_.geometry, 600, seed);
  ASSERT_NE(PutReady(prompt), "");
  for (const char* name : {"none", "moment", "moment/r4", "scan"}) {
    for (const uint32_t k : {0u, 8u, 100u, 1000u}) {
      SCOPED_TRACE(std::string(name) + ", K = " + std::to_string(k));
      StepPolicy policy = Policy(Variant(name), k);
      policy.report_missing = true;
      const auto session = Attach(prompt, policy);
      ASSERT_TRUE(session);
      const auto q = prompt.Q(0, 590, 1);
      const Output out = Step(*session, 0, q), full = Full(prompt, 0, q);
      const auto none = Attach(prompt, Policy(EstimatorKind::kNone, k));
      const Output read = Step(*none, 0, q);
      ASSERT_EQ(out.info.missing.size(), 4u);
      for (size_t g = 0; g < 4; ++g) {
        const MissingMass& missing = out.info.missing[g];
        const double truth = -std::expm1(double{read.lse[g]} - full.lse[g]);
        EXPECT_EQ(missing.certified, k > 0 || Variant(name).kind == EstimatorKind::kScan);
        if (missing.certified) {
          EXPECT_GE(missing.delta, truth - 1e-4);
        }
        // Without any token read, moments cannot see the few far keys that may hold most mass.
        if (k > 0 || Variant(name).kind == EstimatorKind::kScan) {
          EXPECT_NEAR(out.info.rho_z[g], truth, k == 1000 ? 1e-4 : 0.3);
        }
        EXPECT_TRUE(missing.delta >= 0 && missing.delta <= 1);
      }
      if (std::string(name) == "none") {
        EXPECT_EQ(out.lse, read.lse);
        EXPECT_EQ(out.y, read.y);
        EXPECT_EQ(out.info.ledger.rho_z_sum, 0);
      }
    }
  }
}

TEST_F(EstimatorsTest, AdaptiveTokensNeverExceedTheBudget) {
  const uint64_t seed = Seed("AdaptiveTokens");
  Open();
  const auto prompt = MakePrompt(spec_.geometry, 900, seed);
  ASSERT_NE(PutReady(prompt), "");
  for (const char* name : {"none", "moment", "auto"}) {
    StepPolicy policy;
    policy.estimator = Variant(name);
    policy.budget = 0.1;
    policy.adaptive = true;
    const auto session = Attach(prompt, policy);
    ASSERT_TRUE(session);
    std::vector<uint32_t> even, last;
    for (uint32_t step = 0; step < 6; ++step) {
      std::vector<uint32_t> k;
      for (uint32_t layer = 0; layer < 2; ++layer) {
        const Output out = Step(*session, layer, prompt.Q(layer, 850 + step, 1));
        ASSERT_EQ(out.info.k_per_head.size(), 2u);
        k.insert(k.end(), out.info.k_per_head.begin(), out.info.k_per_head.end());
        EXPECT_EQ(out.info.ledger.retrieved_tokens,
                  out.info.k_per_head[0] + uint64_t{out.info.k_per_head[1]});
      }
      if (step == 0) even = k;
      EXPECT_LE(std::accumulate(k.begin(), k.end(), 0u),
                std::accumulate(even.begin(), even.end(), 0u))
          << name;
      last = k;
    }
    EXPECT_NE(last, even) << name;
  }
}

TEST(AdaptiveBudget, SpreadsByMissingMassWithinItsTotal) {
  AdaptiveBudget budget({40, 40, 40, 0}, 1000);
  EXPECT_EQ(budget.Take(0, 2), (std::vector<uint32_t>{40, 40}));
  EXPECT_EQ(budget.Take(2, 2), (std::vector<uint32_t>{40, 0}));
  budget.Note(0, 0.4, 40);
  budget.Note(1, 0.1, 40);
  budget.Note(2, std::nan(""), 40);  // unknown mass: the head keeps its own tokens
  auto first = budget.Take(0, 2), second = budget.Take(2, 2);
  EXPECT_EQ(second, (std::vector<uint32_t>{40, 0}));
  EXPECT_EQ(first[0] + first[1], 80u);
  EXPECT_NEAR(double(first[0]) / first[1], 2, 0.1);  // the root of the masses' ratio
  budget.Note(2, 0.0, 40);
  first = budget.Take(0, 2), second = budget.Take(2, 2);
  EXPECT_EQ(second[0], 10u);  // a head keeps at least a quarter
  EXPECT_EQ(first[0] + first[1] + second[0], 120u);
  // No head gets more tokens than there are.
  AdaptiveBudget little({40, 40}, 45);
  little.Take(0, 2);
  little.Note(0, 1, 40), little.Note(1, 0, 40);
  EXPECT_EQ(little.Take(0, 2)[0], 45u);
}

// In every format tokens take away what they added: with all tokens retrieved nothing remains, and
// a chain reads the features of its segments.
TEST_F(EstimatorsTest, FeaturesAreReadInsteadOfRecomputed) {
  const uint64_t seed = Seed("FeaturesAreRead");
  Use("none, moment, phi");
  AddMaps(4096, seed);
  const auto prompt = MakePrompt(spec_.geometry, 500, seed);
  std::map<std::string, std::vector<Output>> outputs;
  const std::map<std::string, double> tolerance = {
      {"none", 0}, {"log8", 0.1}, {"log16", 2e-3}, {"u8", 0.1}, {"u16", 2e-3}};
  for (const auto& [format, error] : tolerance) {
    SCOPED_TRACE(format);
    options_.phi_features = format;
    options_.dir = dir_.path() / format;
    Open();
    ASSERT_NE(PutReady(MakePrompt(spec_.geometry, 300, seed)), "");
    ASSERT_NE(PutReady(prompt), "");
    for (const uint32_t k : {0u, 16u, 200u, 479u, 480u}) {
      const auto session = Attach(prompt, Policy(EstimatorKind::kPhi, k));
      ASSERT_TRUE(session);
      const auto q = prompt.Q(1, 499, 1);
      outputs[format].push_back(Step(*session, 1, q));
      const Ledger& ledger = outputs[format].back().info.ledger;
      const uint64_t stored = format == "none" || k == 480 ? 0 : format.ends_with("16") ? 16 : 8;
      EXPECT_EQ(ledger.feature_bytes, 2u * k * stored);
      EXPECT_NEAR(ledger.feature_tokens, 2.0 * k * double(stored) / 64, 1e-9);
      if (k < 479) continue;
      const Output full = Full(prompt, 1, q);
      for (size_t g = 0; g < 4; ++g) {
        EXPECT_NEAR(outputs[format].back().lse[g], full.lse[g], k == 480 ? 1e-4 : 0.2);
      }
    }
  }
  for (const auto& [format, error] : tolerance) {
    for (size_t i = 0; i < 3; ++i) {
      for (size_t g = 0; g < 4; ++g) {
        EXPECT_NEAR(outputs[format][i].lse[g], outputs["none"][i].lse[g], error) << format;
      }
    }
  }
  options_.phi_features = "u4";
  EXPECT_CODE(LocalStore::Open(options_), Code::kInvalidArgument);
}

// A long key in the middle of a prefix, in either part of a chain: once it is retrieved the others
// are still estimated, and the budget pays for keeping its row.
TEST_F(EstimatorsTest, AKeyThatOutweighsAllOthersIsKeptApart) {
  const uint64_t seed = 7;
  Use("none, moment, phi");
  AddMaps(4096, seed);
  auto prompt = MakePrompt(spec_.geometry, 900, seed);
  const LayerShape shape = spec_.geometry.layer(1);
  const uint32_t outlier = 600;
  for (uint32_t h = 0; h < shape.n_kv_heads; ++h) {
    const size_t at = (size_t{outlier} * shape.n_kv_heads + h) * shape.row().key_bytes();
    std::vector<float> key(shape.key_dim);
    ToFloat(shape.row().dtype, prompt.k[1].data() + at, key);
    for (float& x : key) x *= 12;
    FromFloat(shape.row().dtype, key, prompt.k[1].data() + at);
  }
  auto first = prompt;
  first.n_tokens = 640;
  first.tokens.resize(640);
  for (const char* format : {"none", "u8", "log16"}) {
    SCOPED_TRACE(format);
    options_.phi_features = format;
    options_.dir = dir_.path() / format;
    Open();
    ASSERT_NE(PutReady(first), "");
    ASSERT_NE(PutReady(prompt), "");
    StepPolicy policy = Policy(EstimatorKind::kPhi, 0);
    policy.k.reset();
    policy.budget = 0.2;
    const auto session = Attach(prompt, policy);
    ASSERT_TRUE(session);
    size_t apart = 0;
    for (uint32_t h = 0; h < shape.n_kv_heads; ++h) {
      const auto cache = PhiCache::Deserialize(*session->PhiCacheBytes(1, h));
      ASSERT_OK(cache);
      EXPECT_EQ(cache->count(), 880u);
      apart += cache->apart().size();
      for (const ApartRow& row : cache->apart()) {
        std::vector<float> key(shape.key_dim);
        const auto rows = prompt.Rows(1, h);
        ToFloat(shape.row().dtype, rows.data() + outlier * shape.row().bytes(), key);
        EXPECT_EQ(row.key, key);
      }
    }
    ASSERT_GT(apart, 0u);
    // A query along the long key retrieves it.
    std::vector<float> q(shape.query_floats());
    for (uint32_t h = 0; h < shape.n_q_heads; ++h) {
      const auto rows = prompt.Rows(1, h / shape.group_size());
      const auto own = std::span(q).subspan(size_t{h} * shape.key_dim, shape.key_dim);
      ToFloat(shape.row().dtype, rows.data() + outlier * shape.row().bytes(), own);
      float norm = 0;
      for (const float x : own) norm += x * x;
      for (float& x : own) x *= 4 / norm;
    }
    const Output out = Step(*session, 1, q);
    for (const float rho : out.info.rho_z) EXPECT_GT(rho, 0.2f);
    EXPECT_LE(out.info.ledger.tokens_per_step(), 180);
  }
}

// Reads before a step failed are charged all the same.
TEST_F(EstimatorsTest, AFailedStepKeepsItsReads) {
  Open();
  const auto prompt = MakePrompt(spec_.geometry, 400, 3);
  ASSERT_NE(PutReady(prompt), "");
  const auto session = Attach(prompt, Policy(EstimatorKind::kNone, 30));
  ASSERT_TRUE(session);
  const auto physical = [&] {
    const auto bytes = session->report()->total.physical_bytes;
    return std::accumulate(bytes.begin(), bytes.end(), uint64_t{0});
  };
  const uint64_t before = physical();
  std::vector<float> q(64, 3e38f), y(64), lse(4);
  EXPECT_FALSE(session->Step(0, q, y, lse, nullptr).ok());
  EXPECT_GE(physical(), before + 360 * 2 * spec_.geometry.row(0).key_bytes());
}

}  // namespace
}  // namespace prefixd::testing
