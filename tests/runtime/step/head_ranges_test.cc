// Tests steps of some of a layer's heads: they get, bit for bit, what these heads get in a step of
// all, and are charged alike.
#include <deque>
#include <map>
#include <random>
#include <set>
#include <tuple>

#include "runtime/step/adaptive_budget.h"
#include "tests/runtime/runtime_fixture.h"

namespace prefixd::testing {
namespace {

constexpr uint32_t kSplitTokens = 3000, kLayers = 2, kKvHeads = 5, kGroup = 2, kDim = 16;

// What a step is charged, but for times and for what caches and other steps of a search saved.
auto Charges(const Ledger& l) {
  return std::tuple(l.steps, l.anchor_tokens, l.retrieved_tokens, l.summary_tokens,
                    l.charged_summary_tokens, l.logical_bytes, l.summary_bytes, l.feature_tokens,
                    l.feature_bytes, l.keys_scanned, l.selections, l.retrievals, l.rho_z_sum,
                    l.rho_z_count);
}

class HeadRanges : public RuntimeTest {
 protected:
  HeadRanges() {
    spec_.geometry = SmallGeometry(kLayers, kKvHeads * kGroup, kKvHeads, kDim);
    options_.build_codes = true;
  }

  void PutIt(uint64_t seed) {
    Open();
    prompt_ = MakePrompt(spec_.geometry, kSplitTokens, seed);
    ASSERT_NE(PutReady(prompt_), "");
  }

  // Policies of every mode, estimator and state that steps keep.
  static std::vector<StepPolicy> Policies() {
    std::vector<StepPolicy> policies(10);
    for (size_t i = 0; i < policies.size(); ++i) policies[i].k = 16 + 5 * uint32_t(i);
    policies[0].mode = StepMode::kFull;
    policies[1].mode = StepMode::kAnchors;
    policies[2].estimator = EstimatorKind::kNone;
    policies[3].estimator = EstimatorKind::kMoment;
    policies[3].k.reset(), policies[3].budget = 0.1;
    policies[4].estimator = EstimatorKind::kScan;
    policies[5].estimator = EstimatorKind::kAuto;
    policies[6].sharing = {.block = 4, .similarity = 0.2, .dilation = 2, .across = true};
    policies[7].adaptive = policies[7].report_missing = true;
    policies[8].prefetch = {.forward = 4, .back = 2};
    policies[9].selector = "exact";
    policies[9].sharing = {.block = 3, .similarity = 0.2};
    return policies;
  }

  // Cuts all heads at random, and shuffles the pieces.
  static std::vector<HeadRange> Pieces(std::mt19937_64& rng) {
    std::vector<HeadRange> pieces;
    for (uint32_t first = 0; first < kKvHeads;) {
      const uint32_t n = 1 + uint32_t(rng() % (kKvHeads - first));
      const bool to_the_last = first + n == kKvHeads && rng() % 2 == 0;
      pieces.push_back({first, to_the_last ? 0 : n});
      first += n;
    }
    std::ranges::shuffle(pieces, rng);
    return pieces;
  }
  static uint32_t HeadsOf(HeadRange range) {
    return range.n > 0 ? range.n : kKvHeads - range.first;
  }

  // What each query head, or KV head, of a step got.
  struct Answer {
    std::vector<float> y = std::vector<float>(kKvHeads * kGroup * kDim);
    std::vector<float> lse = std::vector<float>(kKvHeads * kGroup);
    std::map<uint32_t, uint32_t> k;
    std::map<uint32_t, std::vector<float>> rho_z;  // by KV head
    std::map<uint32_t, size_t> missing;
  };
  // One piece of a step: where it writes, and what it reports.
  struct Piece {
    HeadRange heads;
    Answer* answer;
    StepInfo info;

    StepRequest Request(Session* session, uint32_t layer, std::span<const float> q) {
      const size_t first = size_t{heads.first} * kGroup, n = size_t{HeadsOf(heads)} * kGroup;
      return {session,
              layer,
              q.subspan(first * kDim, n * kDim),
              std::span(answer->y).subspan(first * kDim, n * kDim),
              std::span(answer->lse).subspan(first, n),
              &info,
              {},
              heads};
    }
    void Note() {
      for (uint32_t h = 0; h < HeadsOf(heads); ++h) {
        const uint32_t head = heads.first + h;
        if (!info.k_per_head.empty()) answer->k[head] = info.k_per_head.at(h);
        for (uint32_t g = 0; g < kGroup; ++g) {
          const float rho = info.rho_z.at(h * kGroup + g);
          answer->rho_z[head].push_back(std::isnan(rho) ? -1 : rho);
        }
        if (!info.missing.empty()) answer->missing[head] = info.missing.size() / HeadsOf(heads);
      }
    }
  };

  SyntheticPrompt prompt_;
};

TEST_F(HeadRanges, GetWhatAStepOfAllHeadsGets) {
  const uint64_t seed = Seed("HeadRanges");
  std::mt19937_64 rng(seed);
  PutIt(seed);
  const std::vector<StepPolicy> policies = Policies();
  // The steps of `whole` are of all heads; those of `parts` are cut, and run in any order, alone or
  // in batches with those of other sessions.
  std::vector<std::shared_ptr<Session>> whole, parts;
  for (const StepPolicy& policy : policies) {
    whole.push_back(Attach(prompt_, policy));
    parts.push_back(Attach(prompt_, policy));
    ASSERT_TRUE(whole.back() && parts.back());
  }
  std::set<uint32_t> moved;  // budgets that were adaptive
  for (uint32_t step = 0; step < 12; ++step) {
    // Alike queries in a row, so that steps share sets.
    const uint32_t token = kSplitTokens - 1 - step / 3;
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      const auto q = prompt_.Q(layer, token, 1);
      std::vector<Answer> want(policies.size()), got(policies.size());
      std::deque<Piece> pieces;
      std::vector<std::pair<size_t, Piece*>> order;
      for (size_t p = 0; p < policies.size(); ++p) {
        Piece all{{}, &want[p], {}};
        StepRequest request = all.Request(whole[p].get(), layer, q);
        store_->StepBatch({&request, 1});
        ASSERT_OK(request.status);
        all.Note();
        for (const HeadRange range : Pieces(rng)) {
          order.emplace_back(p, &pieces.emplace_back(Piece{range, &got[p], {}}));
        }
      }
      std::ranges::shuffle(order, rng);
      for (size_t at = 0; at < order.size();) {
        const size_t n = std::min<size_t>(1 + rng() % 9, order.size() - at);
        std::vector<StepRequest> batch;
        for (size_t i = at; i < at + n; ++i) {
          batch.push_back(order[i].second->Request(parts[order[i].first].get(), layer, q));
        }
        store_->StepBatch(batch);
        for (const StepRequest& request : batch) ASSERT_OK(request.status);
        at += n;
      }
      for (const auto& [p, piece] : order) piece->Note();
      for (size_t p = 0; p < policies.size(); ++p) {
        SCOPED_TRACE("policy " + std::to_string(p) + ", step " + std::to_string(step) + ", layer " +
                     std::to_string(layer));
        ASSERT_EQ(got[p].y, want[p].y);
        ASSERT_EQ(got[p].lse, want[p].lse);
        EXPECT_EQ(got[p].k, want[p].k);
        EXPECT_EQ(got[p].rho_z, want[p].rho_z);
        EXPECT_EQ(got[p].missing, want[p].missing);
        if (policies[p].adaptive) {
          for (const auto& [head, k] : got[p].k) moved.insert(k);
        }
      }
    }
  }
  EXPECT_GT(moved.size(), 3u) << "the adaptive budgets never moved";
  for (size_t p = 0; p < policies.size(); ++p) {
    SCOPED_TRACE("policy " + std::to_string(p));
    const SessionReport mine = *parts[p]->report(), theirs = *whole[p]->report();
    for (size_t head = 0; head < theirs.per_head.size(); ++head) {
      EXPECT_EQ(Charges(mine.per_head[head]), Charges(theirs.per_head[head])) << head;
    }
    EXPECT_EQ(Charges(mine.total), Charges(theirs.total));
  }
}

TEST_F(HeadRanges, OfTwoRanksAreChargedAsOneWhole) {
  PutIt(Seed("HeadRanges.Ranks"));
  StepPolicy policy;
  policy.k = 40;
  policy.selector = "exact";
  const auto whole = Attach(prompt_, policy), both = Attach(prompt_, policy);
  const std::vector<std::shared_ptr<Session>> ranks = {Attach(prompt_, policy),
                                                       Attach(prompt_, policy)};
  ASSERT_TRUE(whole && both && ranks[0] && ranks[1]);
  WaitLoaded();
  const std::vector<HeadRange> halves = {{0, 2}, {2, 0}};
  const uint64_t before = store_->Stats()->steps;
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    const auto q = prompt_.Q(layer, kSplitTokens - 1, 1);
    Answer all, half;
    Piece one{{}, &all, {}};
    StepRequest request = one.Request(whole.get(), layer, q);
    store_->StepBatch({&request, 1});
    ASSERT_OK(request.status);
    Ledger sum;
    for (size_t r = 0; r < 2; ++r) {
      Piece part{halves[r], &half, {}};
      for (Session* session : {both.get(), ranks[r].get()}) {
        StepRequest of_rank = part.Request(session, layer, q);
        const Status status =
            session->Step(layer, halves[r], of_rank.q, of_rank.y, of_rank.lse, &part.info);
        ASSERT_OK(status);
        EXPECT_EQ(part.info.k_per_head.size(), HeadsOf(halves[r]));
        EXPECT_EQ(part.info.ledger.steps, HeadsOf(halves[r]));
      }
      sum += part.info.ledger;
    }
    EXPECT_EQ(half.y, all.y);
    EXPECT_EQ(half.lse, all.lse);
    EXPECT_EQ(sum.scan_bytes, one.info.ledger.scan_bytes);
    EXPECT_NEAR(sum.rho_z_sum, one.info.ledger.rho_z_sum, 1e-9);
    sum.rho_z_sum = one.info.ledger.rho_z_sum;  // summed in another order
    EXPECT_EQ(Charges(sum), Charges(one.info.ledger));
  }
  // The store counts steps as they were called, ledgers count their heads.
  EXPECT_EQ(store_->Stats()->steps - before, kLayers * (1 + 2 * 2));
  const SessionReport want = *whole->report();
  EXPECT_EQ(want.total.steps, kLayers * kKvHeads);
  EXPECT_EQ(Charges(both->report()->total), Charges(want.total));
  for (size_t r = 0; r < 2; ++r) {
    const SessionReport of_rank = *ranks[r]->report();
    for (size_t head = 0; head < want.per_head.size(); ++head) {
      const uint32_t h = uint32_t(head) % kKvHeads;
      const bool own = h >= halves[r].first && h < halves[r].first + HeadsOf(halves[r]);
      if (own) {
        EXPECT_EQ(Charges(of_rank.per_head[head]), Charges(want.per_head[head])) << head;
      } else {
        EXPECT_EQ(of_rank.per_head[head].steps, 0u) << head;
      }
    }
  }
}

TEST_F(HeadRanges, AttendExactlyAsAllHeadsDo) {
  const uint64_t seed = Seed("HeadRanges.Exact");
  std::mt19937_64 rng(seed);
  PutIt(seed);
  const auto session = Attach(prompt_, {});
  ASSERT_TRUE(session);
  constexpr uint32_t n = 7;
  const auto q = prompt_.Q(1, kSplitTokens - n, n);
  std::vector<float> y(n * kKvHeads * kGroup * kDim), lse(n * kKvHeads * kGroup);
  ASSERT_OK(session->AttendExact(1, n, q, y, lse));
  for (const HeadRange range : Pieces(rng)) {
    const size_t width = HeadsOf(range) * kGroup, first = range.first * kGroup;
    std::vector<float> part_q, part_y(n * width * kDim), part_lse(n * width);
    std::vector<float> want_y, want_lse;
    for (uint32_t t = 0; t < n; ++t) {
      const size_t at = t * kKvHeads * kGroup + first;
      part_q.insert(part_q.end(), &q[at * kDim], &q[at * kDim] + width * kDim);
      want_y.insert(want_y.end(), &y[at * kDim], &y[at * kDim] + width * kDim);
      want_lse.insert(want_lse.end(), &lse[at], &lse[at] + width);
    }
    ASSERT_OK(session->AttendExact(1, range, n, part_q, part_y, part_lse));
    EXPECT_EQ(part_y, want_y);
    EXPECT_EQ(part_lse, want_lse);
  }
}

// A head that steps twice begins the next round; other heads do not.
TEST(AdaptiveBudget, CountsRoundsByHeads) {
  AdaptiveBudget budget({40, 40, 40, 40}, 1000);
  const auto take = [&](size_t first, uint32_t n) { return budget.Take(first, n); };
  EXPECT_EQ(take(0, 1), (std::vector<uint32_t>{40}));
  budget.Note(0, 0.4, 40);
  EXPECT_EQ(take(1, 1), (std::vector<uint32_t>{40}));  // the same round
  budget.Note(1, 0.1, 40);
  EXPECT_EQ(take(2, 2), (std::vector<uint32_t>{40, 40}));
  const auto first = take(0, 1), second = take(1, 1);
  EXPECT_EQ(first[0] + second[0], 80u);
  EXPECT_GT(first[0], second[0]);
  EXPECT_EQ(take(2, 2), (std::vector<uint32_t>{40, 40}));
}

}  // namespace
}  // namespace prefixd::testing
