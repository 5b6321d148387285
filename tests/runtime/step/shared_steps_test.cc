// Tests steps that share sets: their outputs must be those of the set that
// the spec assigns, with the rest estimated.
#include <algorithm>
#include <cmath>
#include <limits>
#include <set>

#include "attention/reference/reference.h"
#include "tests/runtime/runtime_fixture.h"
#include "tests/runtime/step/plain_sharing.h"

namespace prefixd::testing {
namespace {

class SharedStepTest : public RuntimeTest {
 protected:
  // Returns a step over the anchors and `ids`, the rest estimated by moments where the layer has
  // them.
  reference::States Expected(const SyntheticPrompt& prompt, uint32_t layer, uint32_t kv_head,
                             std::span<const float> group_q, const std::vector<uint32_t>& ids,
                             std::span<const Cut> cuts) {
    const KvGeometry& g = prompt.geometry;
    const RowShape row = g.row(0);
    bytes_ = prompt.Rows(layer, kv_head);
    const RowsView rows{bytes_.data(), prompt.n_tokens, row.bytes(), row};
    const Partition part = Partition::Of(prompt.n_tokens, options_.anchors);
    refs_.clear();
    for (const uint32_t id : ids) refs_.push_back({rows.key(id), rows.value(id)});
    GroupStepInput in;
    in.queries = group_q;
    in.group = g.group_size(0);
    in.layer = g.layers[layer];
    in.sinks = rows.Sub(0, part.sink.size());
    in.tail = rows.Sub(part.tail.begin, part.tail.size());
    in.retrieved = ScatteredRows(refs_, row);
    in.mid_count = part.mid.size();
    moment_ = MomentSummary(row.key_dim, row.value_dim, false);
    moment_.Add(rows.Sub(part.mid.begin, part.mid.size()));
    if (in.layer.softcap == 0) in.estimator = EstimatorKind::kMoment, in.moment = &moment_;
    in.cuts = cuts;
    return reference::GroupStep(in, row.value_dim);
  }

  // Returns [G] log-sum-exps of the scores that group_q gives to `ids`.
  std::vector<double> LogSumExps(const SyntheticPrompt& prompt, uint32_t layer, uint32_t kv_head,
                                 std::span<const float> group_q, const std::vector<uint32_t>& ids) {
    const KvGeometry& g = prompt.geometry;
    const auto bytes = prompt.Rows(layer, kv_head);
    std::vector<RowRef> refs;
    for (const uint32_t id : ids) refs.push_back({bytes.data() + id * g.row(0).bytes(), nullptr});
    std::vector<double> out;
    for (uint32_t i = 0; i < g.group_size(0); ++i) {
      double sum = 0;
      for (const double s : reference::Scores(group_q.subspan(i * g.key_dim, g.key_dim),
                                              g.layers[layer], ScatteredRows(refs, g.row(0)))) {
        sum += std::exp(s);
      }
      out.push_back(std::log(sum));
    }
    return out;
  }

  void ExpectStep(const Output& out, uint32_t kv_head, const reference::States& want) {
    const KvGeometry& g = spec_.geometry;
    for (uint32_t i = 0; i < g.group_size(0); ++i) {
      const size_t head = kv_head * g.group_size(0) + i;
      EXPECT_NEAR(out.lse[head], want.lse[i], 2e-4);
      for (uint32_t j = 0; j < g.value_dim; ++j) {
        const size_t at = i * g.value_dim + j;
        EXPECT_NEAR(out.y[head * g.value_dim + j], want.y[at], 1e-3 * want.abs_y[at] + 1e-6);
      }
    }
  }

  std::span<const float> GroupOf(std::span<const float> q, uint32_t kv_head) const {
    const size_t size = size_t{spec_.geometry.group_size(0)} * spec_.geometry.key_dim;
    return q.subspan(kv_head * size, size);
  }

  // Returns the third (of `k`) of `ids` that scores best, by the largest of the group's
  // probabilities among them.
  std::vector<uint32_t> BestThird(const SyntheticPrompt& prompt, uint32_t layer, uint32_t kv_head,
                                  std::span<const float> group_q, const std::vector<uint32_t>& ids,
                                  size_t k) {
    const KvGeometry& g = prompt.geometry;
    const auto bytes = prompt.Rows(layer, kv_head);
    std::vector<RowRef> refs;
    for (const uint32_t id : ids) refs.push_back({bytes.data() + id * g.row(0).bytes(), nullptr});
    std::vector<double> best(ids.size(), -std::numeric_limits<double>::infinity());
    for (uint32_t i = 0; i < g.group_size(0); ++i) {
      const auto scores = reference::Scores(group_q.subspan(i * g.key_dim, g.key_dim),
                                            g.layers[layer], ScatteredRows(refs, g.row(0)));
      double sum = 0;
      for (const double s : scores) sum += std::exp(s);
      for (size_t j = 0; j < ids.size(); ++j)
        best[j] = std::max(best[j], scores[j] - std::log(sum));
    }
    std::vector<size_t> order(ids.size());
    for (size_t j = 0; j < order.size(); ++j) order[j] = j;
    std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return best[a] > best[b]; });
    std::vector<uint32_t> out;
    for (size_t j = 0; j < k / 3; ++j) out.push_back(ids[order[j]]);
    return out;
  }

  // Runs steps of layer 1 whose queries wander and retrieve k tokens. check: called with each
  // step's tokens.
  template <typename Check>
  void ExpectSharedSets(Random& random, uint32_t k, const Check& check) {
    Open();
    const auto prompt = MakePrompt(spec_.geometry, 900, 3);
    ASSERT_NE(PutReady(prompt), "");
    ASSERT_OK(store_->WaitRewritten(nullptr));
    StepPolicy policy;
    policy.k = k;
    policy.selector = "exact";
    policy.estimator = EstimatorKind::kMoment;
    policy.sharing = {8, 0.8, 1, false};
    policy.report_missing = true;
    const auto session = Attach(prompt, policy);
    ASSERT_TRUE(session);
    const KvGeometry& g = spec_.geometry;
    const TokenRange mid = Partition::Of(prompt.n_tokens, options_.anchors).mid;
    const auto queries = Wander(random, 30, size_t{g.n_q_heads} * g.key_dim);
    std::vector<std::vector<std::vector<float>>> by_head(g.n_kv_heads);
    for (uint32_t h = 0; h < g.n_kv_heads; ++h) {
      for (const auto& q : queries) {
        const auto part = GroupOf(q, h);
        by_head[h].emplace_back(part.begin(), part.end());
      }
    }
    uint64_t searches = 0, tokens = 0;
    for (size_t t = 0; t < queries.size(); ++t) {
      const Output out = Step(*session, 1, queries[t]);
      EXPECT_EQ(out.info.ledger.selections, g.n_kv_heads);
      for (uint32_t h = 0; h < g.n_kv_heads; ++h) {
        const size_t from = PlainSharing(by_head[h], g.group_size(0), policy.sharing)[t];
        const auto& q = by_head[h][from];
        const auto selected = session->Select(1, h, q, k);
        ASSERT_OK(selected);
        const std::vector<uint32_t>& first = selected->ids;
        std::vector<uint32_t> ids = first;
        // Expects the retrieving query's cuts moved with the log-sum-exp of the set that was read,
        // and no longer certified.
        std::vector<Cut> cuts = selected->cuts;
        if (from != t) {
          std::set<uint32_t> wide(selected->ids.begin(), selected->ids.end());
          for (const uint32_t best : BestThird(prompt, 1, h, q, first, k)) {
            for (const uint32_t id : {best - 1, best, best + 1}) {
              if (mid.contains(id)) wide.insert(id);
            }
          }
          ids.assign(wide.begin(), wide.end());
          const auto now = LogSumExps(prompt, 1, h, by_head[h][t], ids);
          const auto then = LogSumExps(prompt, 1, h, q, first);
          for (uint32_t i = 0; i < g.group_size(0); ++i) {
            EXPECT_EQ(cuts[i].kind, CutKind::kExact);
            cuts[i] = {static_cast<float>(cuts[i].score + now[i] - then[i]), CutKind::kApproximate};
            EXPECT_FALSE(out.info.missing[h * g.group_size(0) + i].certified);
          }
        } else {
          ++searches;
        }
        tokens += ids.size();
        check(ids);
        ExpectStep(out, h, Expected(prompt, 1, h, by_head[h][t], ids, cuts));
      }
    }
    const SessionReport report = *session->report();
    const uint64_t asked = queries.size() * g.n_kv_heads;  // this test's own selections
    EXPECT_EQ(report.total.selections, 2 * asked);
    EXPECT_EQ(report.total.retrievals, asked + searches);
    EXPECT_LT(searches, asked / 2);
    EXPECT_EQ(report.total.retrieved_tokens, tokens);
  }

  std::vector<std::byte> bytes_;
  std::vector<RowRef> refs_;
  MomentSummary moment_;
};

// In a decode with clustered index sharing every step's output is that of the set which the spec
// assigns.
TEST_F(SharedStepTest, StepsReadTheSetsTheyShare) {
  Random random(Seed("StepsReadTheSetsTheyShare"));
  ExpectSharedSets(random, 30, [](const auto& ids) { EXPECT_GE(ids.size(), 30u); });
}

// Scores are compared after the softcap, and capped once for attention.
TEST_F(SharedStepTest, UnderASoftcapTheyDoToo) {
  Random random(Seed("UnderASoftcapTheyDoToo"));
  spec_.geometry.layers[1].softcap = 10;
  ExpectSharedSets(random, 30, [](const auto& ids) { EXPECT_GE(ids.size(), 30u); });
}

// Without two queries alike enough, or with blocks of one, every step is Top-K, to the bit.
TEST_F(SharedStepTest, WithoutSharingItIsTopKEachStep) {
  Random random(Seed("WithoutSharingItIsTopKEachStep"));
  Open();
  const auto prompt = MakePrompt(spec_.geometry, 700, 4);
  ASSERT_NE(PutReady(prompt), "");
  StepPolicy plain;
  plain.k = 25;
  StepPolicy never = plain, single = plain;
  never.sharing = {16, 1.0, 3, true};
  single.sharing = {1, 0.0, 3, false};
  const auto a = Attach(prompt, plain), b = Attach(prompt, never), c = Attach(prompt, single);
  for (const auto& q : Wander(random, 20, size_t{spec_.geometry.n_q_heads} * 16)) {
    const Output want = Step(*a, 0, q);
    for (const auto& session : {b, c}) {
      const Output got = Step(*session, 0, q);
      EXPECT_EQ(got.y, want.y);
      EXPECT_EQ(got.lse, want.lse);
      EXPECT_EQ(got.info.ledger.retrieval_ratio(), 1);
    }
  }
}

TEST_F(SharedStepTest, BlocksBoundTheRatioFromBelowAndReuseGoesBeyond) {
  Random random(2);
  Open();
  const auto prompt = MakePrompt(spec_.geometry, 700, 4);
  ASSERT_NE(PutReady(prompt), "");
  StepPolicy policy;
  policy.k = 25;
  policy.sharing = {16, -1.0, 1, false};  // all queries are alike
  const auto blocks = Attach(prompt, policy);
  policy.sharing.across = true;
  const auto across = Attach(prompt, policy);
  policy.sharing.block = 1;
  const auto last = Attach(prompt, policy);
  for (const auto& q : Wander(random, 64, size_t{spec_.geometry.n_q_heads} * 16)) {
    for (const auto& session : {blocks, across, last}) Step(*session, 0, q);
  }
  EXPECT_EQ(blocks->report()->total.retrieval_ratio(), 1.0 / 16);
  EXPECT_EQ(across->report()->total.retrieval_ratio(), 1.0 / 64);
  EXPECT_EQ(last->report()->total.retrieval_ratio(), 1.0 / 64);
  // A new policy starts a new block.
  ASSERT_OK(last->SetPolicy(policy));
  EXPECT_EQ(Step(*last, 0, prompt.Q(0, 600, 1)).info.ledger.retrieval_ratio(), 1);
}

// A budget holds although dilation reads more than K.
TEST_F(SharedStepTest, ABudgetPaysForDilation) {
  Random random(Seed("ABudgetPaysForDilation"));
  Open();
  const auto prompt = MakePrompt(spec_.geometry, 1500, 8);
  ASSERT_NE(PutReady(prompt), "");
  StepPolicy policy;
  policy.estimator = EstimatorKind::kNone;
  policy.budget = 0.1;  // 150 tokens, 20 of them anchors
  policy.sharing = {16, -1.0, 3, false};
  const auto session = Attach(prompt, policy);
  ASSERT_TRUE(session);
  for (const auto& q : Wander(random, 20, size_t{spec_.geometry.n_q_heads} * 16)) {
    const Output out = Step(*session, 0, q);
    EXPECT_EQ(out.info.k, 44u);  // 44 + 2 * 3 * floor(44 / 3) = 128 of 130
    EXPECT_LE(out.info.ledger.tokens_per_step(), 150);
  }
}

TEST_F(SharedStepTest, WhatMakesNoSenseIsRefused) {
  Open();
  const auto prompt = MakePrompt(spec_.geometry, 600, 8);
  ASSERT_NE(PutReady(prompt), "");
  StepPolicy good;
  good.k = 10;
  const auto session = Attach(prompt, good);
  ASSERT_TRUE(session);
  const auto refused = [&](auto change, const char* says) {
    StepPolicy policy = good;
    change(policy);
    const Status status = session->SetPolicy(policy);
    ASSERT_FALSE(status.ok()) << says;
    EXPECT_EQ(status.error().code, Code::kInvalidArgument);
    EXPECT_NE(status.error().message.find(says), std::string::npos) << status.error().message;
  };
  const double nan = std::numeric_limits<double>::quiet_NaN();
  refused([](StepPolicy& p) { p.sharing.block = 0; }, "sharing.block");
  refused([](StepPolicy& p) { p.sharing.block = 257; }, "sharing.block");
  refused([](StepPolicy& p) { p.sharing.similarity = 1.5; }, "sharing.similarity");
  refused([&](StepPolicy& p) { p.sharing.similarity = nan; }, "sharing.similarity");
  refused([](StepPolicy& p) { p.sharing.dilation = 17; }, "sharing.dilation");
  refused([](StepPolicy& p) { p.sharing.block = 8, p.adaptive = true; }, "adaptive");
  refused([](StepPolicy& p) { p.sharing.block = 8, p.mode = StepMode::kFull; }, "mode 'full'");
  refused([](StepPolicy& p) { p.sharing.block = 8, p.estimator = EstimatorKind::kScan; }, "scan");
  refused(
      [](StepPolicy& p) {
        p.sharing.block = 8, p.fixed = {{0, 0, EstimatorKind::kScan}};
      },
      "scan");
  EXPECT_EQ(session->policy(), good);
}

}  // namespace
}  // namespace prefixd::testing
