// Tests sessions: policies and their refusals, limits, rows, batches, concurrency.
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <thread>

#include "tests/runtime/runtime_fixture.h"

namespace prefixd::testing {
namespace {

using SessionTest = RuntimeTest;

TEST_F(SessionTest, InfeasibleBudgetsAreSaid) {
  AddMaps(2048, 1);
  Open();
  const auto prompt = MakePrompt(spec_.geometry, 1000, 1);
  ASSERT_NE(PutReady(prompt, false), "");
  StepPolicy policy;
  policy.budget = 0.01;  // 10 tokens; the anchors alone are 20
  policy.estimator = EstimatorKind::kNone;
  EXPECT_CODE(store_->Attach({"tiny", "", prompt.tokens, "", 0, policy}), Code::kInfeasible);
  policy.budget = 0.02;  // 20: pays for the anchors, not for a summary
  const auto session = Attach(prompt, policy);
  ASSERT_TRUE(session);
  EXPECT_EQ(Step(*session, 0, prompt.Q(0, 999, 1)).info.k, 0u);
  StepPolicy moment = policy;
  moment.estimator = EstimatorKind::kMoment;
  EXPECT_CODE(session->SetPolicy(moment), Code::kInfeasible);
  EXPECT_EQ(session->policy(), policy);  // unchanged
  moment.k = 3;                          // a fixed K needs no budget
  ASSERT_OK(session->SetPolicy(moment));
  EXPECT_EQ(Step(*session, 0, prompt.Q(0, 999, 1)).info.k, 3u);
  policy.budget = 1.5;
  EXPECT_CODE(session->SetPolicy(policy), Code::kInvalidArgument);
  policy = {};
  policy.selector = "crystal ball";
  EXPECT_CODE(session->SetPolicy(policy), Code::kInvalidArgument);
  policy = {};
  policy.selector = "ivf";
  policy.k = 10;
  EXPECT_CODE(session->SetPolicy(policy), Code::kFailedPrecondition);
  policy = {};
  policy.l_gen = 0;
  EXPECT_CODE(session->SetPolicy(policy), Code::kInvalidArgument);
  // `auto` does not choose what the budget cannot pay for.
  StepPolicy any;
  any.budget = 0.02;
  const auto untuned = Attach(prompt, any);
  ASSERT_TRUE(untuned);
  EXPECT_EQ(untuned->info().estimator, "none, untuned");
}

TEST_F(SessionTest, PhiNeedsMaps) {
  Open();
  const auto prompt = MakePrompt(spec_.geometry, 500, 2);
  ASSERT_NE(PutReady(prompt), "");
  StepPolicy policy;
  policy.estimator = EstimatorKind::kPhi;
  policy.k = 8;
  const auto refused = store_->Attach({"tiny", "", prompt.tokens, "", 0, policy});
  EXPECT_CODE(refused, Code::kFailedPrecondition);
  EXPECT_NE(refused.error().message.find("feature maps"), std::string::npos);
  policy.estimator = EstimatorKind::kMoment;
  const auto session = Attach(prompt, policy);
  ASSERT_TRUE(session);
  EXPECT_EQ(session->info().d_phi, 0u);
  EXPECT_CODE(session->PhiCacheBytes(0, 0), Code::kNotFound);
  ASSERT_OK(session->MomentBytes(1, 1));
  EXPECT_CODE(session->MomentBytes(0, 2), Code::kInvalidArgument);
}

TEST_F(SessionTest, LimitsAndDetach) {
  options_.max_sessions = 2;
  Open();
  const auto prompt = MakePrompt(spec_.geometry, 100, 3);
  ASSERT_NE(Put(prompt), "");
  StepPolicy policy;
  policy.k = 4;
  auto a = Attach(prompt, policy), b = Attach(prompt, policy);
  ASSERT_TRUE(a && b);
  EXPECT_NE(a->info().id, b->info().id);
  EXPECT_CODE(store_->Attach({"tiny", "", prompt.tokens, "", 0, policy}), Code::kResourceExhausted);
  ASSERT_OK(a->Detach());
  EXPECT_CODE(a->Detach(), Code::kFailedPrecondition);
  std::vector<float> y(64), lse(4);
  EXPECT_CODE(a->Step(0, prompt.Q(0, 99, 1), y, lse, nullptr), Code::kFailedPrecondition);
  EXPECT_CODE(a->SetPolicy(policy), Code::kFailedPrecondition);
  auto c = store_->Attach({"tiny", "", prompt.tokens, "", 0, policy});  // a's place is free
  ASSERT_OK(c);
  EXPECT_EQ(store_->Stats().value().sessions, 2u);
}

TEST_F(SessionTest, SessionsOutliveTheirStore) {
  Open();
  const auto prompt = MakePrompt(spec_.geometry, 300, 4);
  ASSERT_NE(Put(prompt), "");
  StepPolicy policy;
  policy.k = 20;
  const auto session = Attach(prompt, policy);
  ASSERT_TRUE(session);
  const Output before = Step(*session, 0, prompt.Q(0, 299, 1));
  store_.reset();
  EXPECT_EQ(Step(*session, 0, prompt.Q(0, 299, 1)).y, before.y);
}

TEST_F(SessionTest, QueriesAreChecked) {
  Open();
  const auto prompt = MakePrompt(spec_.geometry, 100, 5);
  ASSERT_NE(Put(prompt), "");
  StepPolicy policy;
  policy.k = 4;
  const auto session = Attach(prompt, policy);
  ASSERT_TRUE(session);
  std::vector<float> q(64, 0.5f), y(64), lse(4);
  EXPECT_CODE(session->Step(2, q, y, lse, nullptr), Code::kInvalidArgument);
  EXPECT_CODE(session->Step(0, std::span(q).first(63), y, lse, nullptr), Code::kInvalidArgument);
  EXPECT_CODE(session->Step(0, q, std::span(y).first(60), lse, nullptr), Code::kInvalidArgument);
  EXPECT_CODE(session->Step(0, q, y, std::span(lse).first(3), nullptr), Code::kInvalidArgument);
  q[37] = std::numeric_limits<float>::quiet_NaN();
  const Status status = session->Step(0, q, y, lse, nullptr);
  EXPECT_CODE(status, Code::kInvalidArgument);
  EXPECT_NE(status.error().message.find("head 2"), std::string::npos) << status.error().message;
}

TEST_F(SessionTest, RowsComeBackAsPut) {
  Open();
  const auto prompt = MakePrompt(spec_.geometry, 333, 6);
  ASSERT_NE(Put(prompt), "");
  StepPolicy policy;
  policy.k = 4;
  const auto session = Attach(prompt, policy);
  ASSERT_TRUE(session);
  const size_t row = spec_.geometry.row(0).bytes();
  const auto want = prompt.Rows(1, 1);
  std::vector<std::byte> all(333 * row), some(3 * row);
  ASSERT_OK(session->ReadRange(1, 1, {0, 333}, all));
  EXPECT_EQ(all, want);
  const std::vector<uint32_t> ids = {0, 77, 332};
  ASSERT_OK(session->ReadRows(1, 1, ids, some));
  for (size_t i = 0; i < ids.size(); ++i) {
    EXPECT_EQ(std::memcmp(some.data() + i * row, want.data() + ids[i] * row, row), 0);
  }
  EXPECT_EQ(session->report()->per_head[3].retrieved_tokens, 3u);
  EXPECT_CODE(session->ReadRange(1, 1, {300, 334}, std::span(all).first(34 * row)),
              Code::kInvalidArgument);
  const std::vector<uint32_t> falling = {5, 5, 6};
  EXPECT_CODE(session->ReadRows(1, 1, falling, some), Code::kInvalidArgument);
}

TEST_F(SessionTest, BatchesEqualSingleStepsAndFailAlone) {
  const uint64_t seed = Seed("BatchesEqualSingleSteps");
  Open();
  const auto one = MakePrompt(spec_.geometry, 400, seed);
  const auto two = MakePrompt(spec_.geometry, 250, seed + 1);
  ASSERT_NE(PutReady(one), "");
  ASSERT_NE(PutReady(two), "");
  StepPolicy policy;
  policy.k = 25;
  const auto a = Attach(one, policy);
  policy.estimator = EstimatorKind::kNone;
  const auto b = Attach(two, policy);
  ASSERT_TRUE(a && b);
  std::vector<Output> outputs(4);
  std::vector<StepRequest> requests;
  const auto bad = std::vector<float>(3);
  for (size_t i = 0; i < 4; ++i) {
    outputs[i].y.resize(64);
    outputs[i].lse.resize(4);
    const auto& prompt = i % 2 ? two : one;
    requests.push_back({i % 2 ? b.get() : a.get(),
                        static_cast<uint32_t>(i / 2),
                        prompt.Q(static_cast<uint32_t>(i / 2), 200 + i, 1),
                        outputs[i].y,
                        outputs[i].lse,
                        &outputs[i].info,
                        {}});
  }
  requests.push_back({a.get(), 0, bad, outputs[0].y, outputs[0].lse, nullptr, {}});
  requests.push_back({nullptr, 0, bad, outputs[0].y, outputs[0].lse, nullptr, {}});
  store_->StepBatch(requests);
  for (size_t i = 0; i < 4; ++i) {
    ASSERT_OK(requests[i].status);
    const Output alone = Step(*(i % 2 ? b : a), requests[i].layer, requests[i].q);
    EXPECT_EQ(alone.y, outputs[i].y);
    EXPECT_EQ(alone.lse, outputs[i].lse);
    EXPECT_EQ(outputs[i].info.k, 25u);
    EXPECT_EQ(outputs[i].info.ledger.retrieved_tokens, 50u);
  }
  EXPECT_CODE(requests[4].status, Code::kInvalidArgument);
  EXPECT_CODE(requests[5].status, Code::kInvalidArgument);
}

TEST_F(SessionTest, PutsStepsAndBatchesRunTogether) {
  const uint64_t seed = Seed("PutsStepsAndBatchesRunTogether");
  Open();
  const auto shared = MakePrompt(spec_.geometry, 300, seed);
  ASSERT_NE(PutReady(shared), "");
  StepPolicy policy;
  policy.k = 15;
  const auto session = Attach(shared, policy);
  ASSERT_TRUE(session);
  const auto q = shared.Q(0, 299, 1);
  const Output want = Step(*session, 0, q);
  std::atomic<int> wrong{0}, steps{0};
  std::vector<std::thread> threads;
  for (uint64_t t = 0; t < 2; ++t) {
    threads.emplace_back([&, t] {  // puts, ready waits, attaches, removals
      for (uint64_t i = 0; i < 4; ++i) {
        const auto prompt = MakePrompt(spec_.geometry, 120, seed + 10 + t * 10 + i);
        auto put = store_->BeginPut({"tiny", "", prompt.tokens, ""});
        if (!put.ok()) {
          ++wrong;
          continue;
        }
        for (uint32_t l = 0; l < 2; ++l) {
          wrong += !(*put)->Write(l, 0, 120, prompt.K(l, 0, 120), prompt.V(l, 0, 120)).ok();
          wrong += !(*put)->WriteQueries(l, 0, 120, prompt.Q(l, 0, 120)).ok();
        }
        auto result = (*put)->Commit();
        if (!result.ok()) {
          ++wrong;
          continue;
        }
        wrong += !store_->WaitReady(result->prefix, nullptr).ok();
        wrong += !store_->Attach({"tiny", "", prompt.tokens, "", 0, policy}).ok();
        if (i % 2) wrong += !store_->Remove(result->prefix).ok();
      }
    });
    threads.emplace_back([&] {  // the same step from several threads, alone and in batches
      for (int i = 0; i < 40; ++i) {
        Output out{std::vector<float>(64), std::vector<float>(4), {}};
        Output out2 = out;
        StepRequest requests[2] = {{session.get(), 0, q, out.y, out.lse, &out.info, {}},
                                   {session.get(), 0, q, out2.y, out2.lse, nullptr, {}}};
        store_->StepBatch(std::span(requests).first(1 + i % 2));
        wrong += !requests[0].status.ok() || out.y != want.y || out.lse != want.lse;
        steps += 1 + i % 2;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(session->report()->total.steps, 2u * (steps + 1u));
}

TEST_F(SessionTest, CutPrefixesAttendOverFewerTokens) {
  const uint64_t seed = Seed("CutPrefixesAttendOverFewerTokens");
  Open();
  const auto prompt = MakePrompt(spec_.geometry, 500, seed);
  const auto shorter = MakePrompt(spec_.geometry, 230, seed);
  const std::string id = PutReady(prompt);
  StepPolicy policy;
  policy.mode = StepMode::kFull;
  auto cut = store_->Attach({"tiny", "", {}, id, 230, policy});
  ASSERT_OK(cut);
  EXPECT_EQ((*cut)->info().n_tokens, 230u);
  const auto same = Attach(shorter, policy);  // its tokens match the beginning
  ASSERT_TRUE(same);
  EXPECT_EQ(same->info().n_tokens, 230u);
  const Output a = Step(**cut, 0, prompt.Q(0, 229, 1)), b = Step(*same, 0, prompt.Q(0, 229, 1));
  EXPECT_EQ(a.y, b.y);
  EXPECT_CODE(store_->Attach({"tiny", "", {}, id, 501, policy}), Code::kInvalidArgument);
}

}  // namespace
}  // namespace prefixd::testing
