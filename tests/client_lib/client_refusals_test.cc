// Runs every failure of a session and of a batch on every kind of client.
#include <vector>

#include "tests/client_lib/client_refusals.h"

namespace prefixd::testing {
namespace {

TEST_P(ClientRefusals, ArgumentsOfSessions) {
  constexpr Code kArgument = Code::kInvalidArgument, kState = Code::kFailedPrecondition;
  ExpectRefused({
      {"step: layer", kArgument, [&](auto&, auto& s) { return Step(s, 2, kQ, kY, kLse); }},
      {"step: q", kArgument, [&](auto&, auto& s) { return Step(s, 0, kQ - 1, kY, kLse); }},
      {"step: no q", kArgument, [&](auto&, auto& s) { return Step(s, 0, 0, kY, kLse); }},
      {"step: y", kArgument, [&](auto&, auto& s) { return Step(s, 0, kQ, kY + 1, kLse); }},
      {"step: no y", kArgument, [&](auto&, auto& s) { return Step(s, 0, kQ, 0, kLse); }},
      {"step: lse", kArgument, [&](auto&, auto& s) { return Step(s, 0, kQ, kY, kLse - 1); }},
      {"step: NaN", kArgument, [&](auto&, auto& s) { return Step(s, 0, kQ, kY, kLse, kNan); }},
      {"step: Inf", kArgument, [&](auto&, auto& s) { return Step(s, 0, kQ, kY, kLse, kInf); }},
      {"exact: layer", kArgument, [&](auto&, auto& s) { return Exact(s, 2, 3, 3); }},
      {"exact: n", kArgument, [&](auto&, auto& s) { return Exact(s, 0, 2, 3); }},
      {"exact: NaN", kArgument, [&](auto&, auto& s) { return Exact(s, 0, 3, 3, kNan); }},
      {"rows: layer", kArgument, [&](auto&, auto& s) { return Rows(s, 2, 0, {1}); }},
      {"rows: head", kArgument, [&](auto&, auto& s) { return Rows(s, 0, 2, {1}); }},
      {"rows: head, no ids", kArgument, [&](auto&, auto& s) { return Rows(s, 0, 2, {}); }},
      {"rows: beyond", kArgument,
       [&](auto&, auto& s) {
         return Rows(s, 0, 0, {1, kTokens});
       }},
      {"rows: order", kArgument,
       [&](auto&, auto& s) {
         return Rows(s, 0, 0, {5, 4});
       }},
      {"rows: twice", kArgument,
       [&](auto&, auto& s) {
         return Rows(s, 0, 0, {5, 5});
       }},
      {"rows: size", kArgument, [&](auto&, auto& s) { return Rows(s, 0, 0, {5}, 1); }},
      {"rows: head before size", kArgument, [&](auto&, auto& s) { return Rows(s, 0, 9, {5}, 1); }},
      {"in place: head", kArgument,
       [](auto&, auto& s) { return StatusOf(s.ReadInPlace(0, 2, std::vector<uint32_t>{1})); }},
      {"in place: no ids, layer", kArgument,
       [](auto&, auto& s) { return StatusOf(s.ReadInPlace(7, 0, {})); }},
      {"in place: beyond", kArgument,
       [](auto&, auto& s) { return StatusOf(s.ReadInPlace(0, 0, std::vector{kTokens})); }},
      {"range: layer", kArgument,
       [&](auto&, auto& s) {
         return Range(s, 2, 0, {0, 4}, 4);
       }},
      {"range: head", kArgument,
       [&](auto&, auto& s) {
         return Range(s, 0, 2, {0, 4}, 4);
       }},
      {"range: backward", kArgument,
       [&](auto&, auto& s) {
         return Range(s, 0, 0, {4, 2}, 2);
       }},
      {"range: beyond", kArgument,
       [&](auto&, auto& s) {
         return Range(s, 0, 0, {kTokens - 1, kTokens + 1}, 2);
       }},
      {"range: size", kArgument,
       [&](auto&, auto& s) {
         return Range(s, 0, 0, {0, 4}, 5);
       }},
      {"range: empty, head", kArgument,
       [&](auto&, auto& s) {
         return Range(s, 0, 2, {0, 0}, 0);
       }},
      {"layer: layer", kArgument,
       [&](auto&, auto& s) {
         return Layer(s, {2, {0, 4}}, 8, 8);
       }},
      {"layer: head", kArgument,
       [&](auto&, auto& s) {
         return Layer(s, {0, {0, 4}, {2}}, 8, 8);
       }},
      {"layer: heads", kArgument,
       [&](auto&, auto& s) {
         return Layer(s, {0, {0, 4}, {1, 2}}, 8, 8);
       }},
      {"layer: range", kArgument,
       [&](auto&, auto& s) {
         return Layer(s, {0, {0, kTokens + 1}}, 8, 8);
       }},
      {"layer: k", kArgument,
       [&](auto&, auto& s) {
         return Layer(s, {0, {0, 4}}, 7, 8);
       }},
      {"layer: v", kArgument,
       [&](auto&, auto& s) {
         return Layer(s, {0, {0, 4}}, 8, 9);
       }},
      {"tokens: backward", kArgument,
       [&](auto&, auto& s) {
         return Ids(s, {4, 2}, 2);
       }},
      {"tokens: beyond", kArgument,
       [&](auto&, auto& s) {
         return Ids(s, {0, kTokens + 1}, 401);
       }},
      {"tokens: size", kArgument,
       [&](auto&, auto& s) {
         return Ids(s, {0, 4}, 3);
       }},
      {"select: layer", kArgument, [&](auto&, auto& s) { return Select(s, 2, 0, 2 * kDim); }},
      {"select: head", kArgument, [&](auto&, auto& s) { return Select(s, 0, 2, 2 * kDim); }},
      {"select: q", kArgument, [&](auto&, auto& s) { return Select(s, 0, 0, 2 * kDim - 1); }},
      {"select: NaN", kArgument, [&](auto&, auto& s) { return Select(s, 0, 0, 2 * kDim, kNan); }},
      {"summary: none", kArgument,
       [](auto&, auto& s) { return StatusOf(s.SummaryBytes(0, 0, EstimatorKind::kNone)); }},
      {"summary: auto", kArgument,
       [](auto&, auto& s) { return StatusOf(s.SummaryBytes(0, 0, EstimatorKind::kAuto)); }},
      {"summary: layer", kArgument, [](auto&, auto& s) { return StatusOf(s.MomentBytes(2, 0)); }},
      {"summary: no maps", Code::kNotFound,
       [](auto&, auto& s) { return StatusOf(s.PhiCacheBytes(0, 0)); }},
      {"policy: budget", kArgument, [](auto&, auto& s) { return s.SetPolicy({.budget = 0}); }},
      {"policy: budget above 1", kArgument,
       [](auto&, auto& s) { return s.SetPolicy({.budget = 1.5}); }},
      {"policy: NaN", kArgument, [](auto&, auto& s) { return s.SetPolicy({.budget = kNan}); }},
      {"policy: infeasible", Code::kInfeasible,
       [](auto&, auto& s) { return s.SetPolicy({.budget = 1e-4}); }},
      {"policy: l_gen", kArgument, [](auto&, auto& s) { return s.SetPolicy({.l_gen = 0}); }},
      {"policy: selector", kArgument,
       [](auto&, auto& s) { return s.SetPolicy({.k = 8, .selector = "tea leaves"}); }},
      {"policy: no such index", kState,
       [](auto&, auto& s) { return s.SetPolicy({.k = 8, .selector = "ivf"}); }},
      {"policy: block", kArgument,
       [](auto&, auto& s) { return s.SetPolicy({.k = 8, .sharing = {.block = 257}}); }},
      {"policy: scan and sharing", kArgument,
       [](auto&, auto& s) {
         return s.SetPolicy({.estimator = EstimatorKind::kScan, .k = 8, .sharing = {.block = 4}});
       }},
      {"policy: retain", kArgument,
       [](auto&, auto& s) { return s.SetPolicy({.k = 8, .retain = {.tokens = 8, .by = "lru"}}); }},
      {"policy: prefetch", kArgument,
       [](auto&, auto& s) { return s.SetPolicy({.k = 8, .prefetch = {.forward = 1000}}); }},
      {"policy: fixed head", kArgument,
       [](auto&, auto& s) {
         return s.SetPolicy({.k = 8, .fixed = {{9, 0, EstimatorKind::kNone}}});
       }},
  });
}

TEST_P(ClientRefusals, ADetachedSession) {
  constexpr Code kState = Code::kFailedPrecondition;
  Put(*client_);
  const auto session = Attach(*client_), reference = Attach(*reference_);
  ASSERT_TRUE(session && reference);
  ASSERT_TRUE(session->Detach().ok() && reference->Detach().ok());
  // The state comes before the arguments.
  const std::vector<Case> cases = {
      {"step", kState, [&](auto&, auto& s) { return Step(s, 9, 1, kY, kLse); }},
      {"exact", kState, [&](auto&, auto& s) { return Exact(s, 9, 2, 3); }},
      {"rows", kState,
       [&](auto&, auto& s) {
         return Rows(s, 9, 0, {5, 4});
       }},
      {"no rows", kState, [&](auto&, auto& s) { return Rows(s, 0, 0, {}); }},
      {"in place", kState, [](auto&, auto& s) { return StatusOf(s.ReadInPlace(9, 0, {})); }},
      {"range", kState,
       [&](auto&, auto& s) {
         return Range(s, 9, 0, {4, 2}, 0);
       }},
      {"layer", kState,
       [&](auto&, auto& s) {
         return Layer(s, {9, {4, 2}}, 0, 0);
       }},
      {"tokens", kState,
       [&](auto&, auto& s) {
         return Ids(s, {4, 2}, 0);
       }},
      {"no tokens", kState,
       [&](auto&, auto& s) {
         return Ids(s, {0, 0}, 0);
       }},
      {"select", kState, [&](auto&, auto& s) { return Select(s, 9, 0, 3); }},
      {"summary", kState, [](auto&, auto& s) { return StatusOf(s.MomentBytes(9, 0)); }},
      {"policy", kState, [](auto&, auto& s) { return s.SetPolicy({.budget = 9}); }},
      {"detach", kState, [](auto&, auto& s) { return StatusOf(s.Detach()); }},
  };
  ExpectRefused(cases, *session, *reference);
  EXPECT_EQ(session->policy(), reference->policy());
  EXPECT_EQ(session->policy().k, 24u);
  EXPECT_EQ(session->report()->total.steps, reference->report()->total.steps);
}

TEST_P(ClientRefusals, ABatchTakesSessionsOfItsStore) {
  Put(*client_);
  const auto session = Attach(*client_), foreign = Attach(*reference_);
  ASSERT_TRUE(session && foreign);
  const auto q = Query();
  std::vector<std::vector<float>> y(3, std::vector<float>(kY)), lse(3, std::vector<float>(kLse));
  std::vector<StepRequest> batch = {{foreign.get(), 0, q, y[0], lse[0], nullptr, {}},
                                    {session.get(), 0, q, y[1], lse[1], nullptr, {}},
                                    {nullptr, 0, q, y[2], lse[2], nullptr, {}}};
  client_->StepBatch(batch);
  EXPECT_TRUE(batch[1].status.ok());
  for (const size_t i : {0u, 2u}) {
    ASSERT_FALSE(batch[i].status.ok()) << i;
    EXPECT_EQ(batch[i].status.error().code, Code::kInvalidArgument);
    EXPECT_EQ(batch[i].status.error().message,
              "a batch takes sessions that are attached to its own store");
  }
}

INSTANTIATE_TEST_SUITE_P(Clients, ClientRefusals, EveryKind(), KindName);

}  // namespace
}  // namespace prefixd::testing
