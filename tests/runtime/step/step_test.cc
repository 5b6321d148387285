// Tests steps through the whole runtime against attention/reference/reference.h, on the rows that
// were put.
#include <cmath>
#include <cstring>

#include "attention/reference/reference.h"
#include "attention/step/budget.h"
#include "attention/step/step.h"
#include "tensors/feature_map_file.h"
#include "tests/runtime/runtime_fixture.h"

namespace prefixd::testing {
namespace {

class StepTest : public RuntimeTest {
 protected:
  // Returns what a step of one group must return, from the rows as put and summaries built in one
  // go.
  reference::States Expected(const SyntheticPrompt& prompt, uint32_t layer, uint32_t kv_head,
                             std::span<const float> q, EstimatorKind estimator,
                             const Selection& selection, const FeatureMapSet* maps) {
    const KvGeometry& g = prompt.geometry;
    const RowShape row = g.row(0);
    bytes_ = prompt.Rows(layer, kv_head);
    const RowsView rows{bytes_.data(), prompt.n_tokens, row.bytes(), row};
    const Partition part = Partition::Of(prompt.n_tokens, options_.anchors);
    retrieved_.resize(selection.ids.size() * row.bytes());
    for (size_t i = 0; i < selection.ids.size(); ++i) {
      std::memcpy(retrieved_.data() + i * row.bytes(), rows.key(selection.ids[i]), row.bytes());
    }
    moment_ = MomentSummary(row.key_dim, row.value_dim, false);
    const RowsView mid = rows.Sub(part.mid.begin, part.mid.size());
    moment_.Add(mid);
    GroupStepInput in;
    in.queries = q.subspan(kv_head * g.group_size(0) * g.key_dim, g.group_size(0) * g.key_dim);
    in.group = g.group_size(0);
    in.layer = g.layers[layer];
    in.sinks = rows.Sub(0, part.sink.size());
    in.tail = rows.Sub(part.tail.begin, part.tail.size());
    in.retrieved = {retrieved_.data(), selection.ids.size(), row.bytes(), row};
    in.cuts = selection.cuts;
    in.mid_count = part.mid.size();
    in.estimator = estimator;
    if (estimator == EstimatorKind::kMoment) in.moment = &moment_;
    if (estimator == EstimatorKind::kPhi) {
      phi_ = PhiCache(maps->d_phi, row.value_dim);
      in.phi_k = &maps->phi_k[layer * g.n_kv_heads + kv_head];
      phi_.Add(mid, *in.phi_k);
      in.phi = &phi_;
      in.phi_q = std::span(maps->phi_q)
                     .subspan(layer * g.n_q_heads + kv_head * g.group_size(0), g.group_size(0));
    }
    return reference::GroupStep(in, row.value_dim);
  }

  std::vector<std::byte> bytes_, retrieved_;
  MomentSummary moment_;
  PhiCache phi_;
};

TEST_F(StepTest, FullBudgetIsExactAttention) {
  const uint64_t seed = Seed("FullBudgetIsExactAttention");
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBf16}) {
    spec_.name = std::string(DTypeName(dtype));
    spec_.geometry = SmallGeometry(2, 6, 3, 24, dtype);
    const auto prompt = MakePrompt(spec_.geometry, 2500, seed);
    options_.recluster_min_tokens = 100;
    options_.recluster_chunk_tokens = 256;  // each chunk is a run
    Open();
    ASSERT_NE(Put(prompt), "");
    ASSERT_OK(store_->WaitRewritten(nullptr));
    StepPolicy full;
    full.mode = StepMode::kFull;
    StepPolicy all;  // K = |M|: everything retrieved
    all.k = prompt.n_tokens;
    for (const StepPolicy& policy : {full, all}) {
      const auto session = Attach(prompt, policy);
      ASSERT_TRUE(session);
      for (uint32_t l = 0; l < 2; ++l) {
        const auto q = prompt.Q(l, prompt.n_tokens - 1, 1);
        const Output out = Step(*session, l, q);
        for (uint32_t h = 0; h < spec_.geometry.n_q_heads; ++h) {
          const auto rows = prompt.Rows(l, h / 2);
          const auto want = reference::ExactAttention(
              q.subspan(h * 24, 24), 1, spec_.geometry.layers[l],
              {rows.data(), prompt.n_tokens, spec_.geometry.row(0).bytes(), spec_.geometry.row(0)});
          const double bound = 2e-6 + 4e-7 * want.max_abs_score[0];
          EXPECT_NEAR(out.lse[h], want.lse[0], 1e-5 * (1 + std::abs(want.lse[0])));
          for (uint32_t i = 0; i < 24; ++i) {
            EXPECT_NEAR(out.y[h * 24 + i], want.y[i], 2 * bound * want.abs_y[i] + 1e-7)
                << DTypeName(dtype) << " mode " << StepModeName(policy.mode);
          }
        }
        const Ledger& ledger = out.info.ledger;
        EXPECT_EQ(ledger.anchor_tokens + ledger.retrieved_tokens, 3u * prompt.n_tokens);
      }
    }
    spec_.identity = {{"weights", "w1"}};
  }
}

TEST_F(StepTest, RetrieveEqualsReferenceForEachEstimator) {
  const uint64_t seed = Seed("RetrieveEqualsReferenceForEachEstimator");
  {
    AddMaps(4096, seed);
    Open();
    const auto prompt = MakePrompt(spec_.geometry, 700, seed);
    ASSERT_NE(PutReady(prompt), "");
    auto loaded = LoadFeatureMaps(spec_.feature_maps[0]);
    ASSERT_OK(loaded);
    const FeatureMapSet& maps = *loaded;
    for (const EstimatorKind estimator :
         {EstimatorKind::kNone, EstimatorKind::kMoment, EstimatorKind::kPhi}) {
      for (const uint32_t k : {0u, 1u, 17u, 300u}) {
        StepPolicy policy;
        policy.estimator = estimator;
        policy.k = k;
        policy.selector = "exact";
        const auto session = Attach(prompt, policy);
        ASSERT_TRUE(session);
        const KvGeometry& g = spec_.geometry;
        const uint32_t layer = k % 2;
        const auto q = prompt.Q(layer, 600 + k % 100, 1);
        const Output out = Step(*session, layer, q);
        EXPECT_EQ(out.info.k, k);
        for (uint32_t h = 0; h < g.n_kv_heads; ++h) {
          Selection selection;
          if (k > 0) {
            auto selected = session->Select(
                layer, h, q.subspan(h * g.group_size(0) * g.key_dim, g.group_size(0) * g.key_dim),
                k);
            ASSERT_OK(selected);
            selection = std::move(selected).value();
            ASSERT_EQ(selection.ids.size(), k);
          }
          const auto want = Expected(prompt, layer, h, q, estimator, selection, &maps);
          for (uint32_t head = 0; head < g.group_size(0); ++head) {
            const size_t at = h * g.group_size(0) + head;
            EXPECT_NEAR(out.lse[at], want.lse[head], 2e-4) << EstimatorName(estimator) << " " << k;
            for (uint32_t i = 0; i < g.value_dim; ++i) {
              const size_t e = size_t{head} * g.value_dim + i;
              EXPECT_NEAR(out.y[at * g.value_dim + i], want.y[e], 1e-3 * want.abs_y[e] + 1e-6)
                  << EstimatorName(estimator) << " K = " << k;
            }
          }
        }
      }
    }
  }
}

TEST_F(StepTest, AnchorsModeReadsAnchorsOnly) {
  const uint64_t seed = Seed("AnchorsModeReadsAnchorsOnly");
  Open();
  const auto prompt = MakePrompt(spec_.geometry, 300, seed);
  ASSERT_NE(Put(prompt), "");
  StepPolicy policy;
  policy.mode = StepMode::kAnchors;
  const auto session = Attach(prompt, policy);
  ASSERT_TRUE(session);
  const auto q = prompt.Q(1, 299, 1);
  const Output out = Step(*session, 1, q);
  for (uint32_t h = 0; h < 2; ++h) {
    const auto want = Expected(prompt, 1, h, q, EstimatorKind::kNone, {}, nullptr);
    for (uint32_t i = 0; i < 32; ++i) EXPECT_NEAR(out.y[h * 32 + i], want.y[i], 1e-5);
  }
  EXPECT_EQ(out.info.ledger.anchor_tokens, 2u * 20u);
  EXPECT_EQ(out.info.ledger.retrieved_tokens, 0u);
  EXPECT_EQ(out.info.ledger.keys_scanned, 0u);
}

TEST_F(StepTest, SuffixQueriesAttendExactly) {
  const uint64_t seed = Seed("SuffixQueriesAttendExactly");
  options_.recluster_min_tokens = 100;
  options_.recluster_chunk_tokens = 256;
  Open();
  const auto prompt = MakePrompt(spec_.geometry, 2300, seed);
  ASSERT_NE(Put(prompt), "");
  ASSERT_OK(store_->WaitRewritten(nullptr));
  const auto session = Attach(prompt, {});
  ASSERT_TRUE(session);
  ExpectSuffix(*session, prompt, 0, 1000, 5);
  const KvGeometry& g = spec_.geometry;
  std::vector<float> y(5 * g.n_q_heads * g.value_dim), lse(5 * g.n_q_heads);
  EXPECT_CODE(session->AttendExact(0, 6, prompt.Q(0, 1000, 5), y, lse), Code::kInvalidArgument);
}

TEST_F(StepTest, LedgerFollowsTheFormulas) {
  const uint64_t seed = Seed("LedgerFollowsTheFormulas");
  AddMaps(2048, seed);
  Open();
  const auto prompt = MakePrompt(spec_.geometry, 1500, seed);
  ASSERT_NE(PutReady(prompt), "");
  const RowShape row = spec_.geometry.row(0);
  const double cost[] = {0, PhiTokens(row, 8, 4), MomentTokens(row, 0, 4)};
  for (const EstimatorKind estimator :
       {EstimatorKind::kNone, EstimatorKind::kMoment, EstimatorKind::kPhi}) {
    for (const uint32_t l_gen : {1u, 10u}) {
      StepPolicy policy;
      policy.estimator = estimator;
      policy.budget = 0.05;
      policy.l_gen = l_gen;
      const auto session = Attach(prompt, policy);
      ASSERT_TRUE(session);
      const double tokens = cost[static_cast<size_t>(estimator)];
      const double paid = l_gen == 1 ? std::ceil(tokens) : tokens / l_gen;
      const auto k = static_cast<uint32_t>(std::floor(75 - 20 - paid));  // ceil(0.05 * 1500) = 75
      const uint32_t steps = 3;
      for (uint32_t s = 0; s < steps; ++s) {
        const Output out = Step(*session, 0, prompt.Q(0, 1400 + s, 1));
        EXPECT_EQ(out.info.k, k);
        EXPECT_EQ(out.info.ledger.steps, 2u);
        EXPECT_EQ(out.info.ledger.anchor_tokens, 40u);
        EXPECT_EQ(out.info.ledger.retrieved_tokens, 2u * k);
        EXPECT_EQ(out.info.ledger.logical_bytes, 2u * (20 + k) * row.bytes());
        EXPECT_EQ(out.info.ledger.keys_scanned, 2u * 1480u);
        EXPECT_EQ(out.info.ledger.retrievals, 2u);
        EXPECT_EQ(out.info.ledger.rho_z_count, 4u);
        EXPECT_EQ(out.info.ledger.summary_tokens, 0);  // charged at attach, once
      }
      auto report = session->Detach();
      ASSERT_OK(report);
      ASSERT_EQ(report->per_head.size(), 4u);
      EXPECT_NEAR(report->per_head[0].summary_tokens, tokens, 1e-9);
      EXPECT_NEAR(report->total.summary_tokens, 4 * tokens, 1e-9);
      EXPECT_EQ(report->total.steps, 2u * steps);
      EXPECT_EQ(report->total.retrieved_tokens, 2u * steps * k);
      EXPECT_EQ(report->total.logical_bytes,
                2u * steps * (20 + k) * row.bytes() +
                    4 * static_cast<uint64_t>(std::llround(tokens * double(row.bytes()))));
      uint64_t physical = 0;
      for (uint64_t bytes : report->total.physical_bytes) physical += bytes;
      EXPECT_GE(physical, 2u * steps * k * row.value_bytes());  // keys may be in memory
    }
  }
}

TEST_F(StepTest, SoftcapLayersUseSelectionOnlyAndWindowsAreRefused) {
  const uint64_t seed = Seed("SoftcapLayersUseSelectionOnlyAndWindowsAreRefused");
  spec_.geometry.layers[0].softcap = 20;
  spec_.geometry.layers[1].sliding_window = 64;
  Open();
  const auto prompt = MakePrompt(spec_.geometry, 400, seed);
  ASSERT_NE(PutReady(prompt), "");
  StepPolicy policy;
  policy.estimator = EstimatorKind::kMoment;
  policy.k = 30;
  const auto session = Attach(prompt, policy);
  ASSERT_TRUE(session);
  const auto q = prompt.Q(0, 399, 1);
  const Output out = Step(*session, 0, q);
  for (uint32_t h = 0; h < 2; ++h) {
    auto selection = session->Select(0, h, q.subspan(h * 32, 32), 30);
    ASSERT_OK(selection);
    const auto want = Expected(prompt, 0, h, q, EstimatorKind::kNone, *selection, nullptr);
    for (uint32_t i = 0; i < 32; ++i) EXPECT_NEAR(out.y[h * 32 + i], want.y[i], 1e-5);
  }
  EXPECT_EQ(out.info.ledger.rho_z_sum, 0);
  std::vector<float> y(64), lse(4);
  EXPECT_CODE(session->Step(1, q, y, lse, nullptr), Code::kFailedPrecondition);
  EXPECT_CODE(session->MomentBytes(0, 0), Code::kFailedPrecondition);
}

}  // namespace
}  // namespace prefixd::testing
