// Tests that steps of sessions which retain own tokens answer as ever, whatever is called.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "tests/runtime/step/retain_fixture.h"

namespace prefixd {
namespace {

using testing::kMemory;
using testing::kRetained;
using testing::NaiveOwn;
using testing::RetainTest;

constexpr uint32_t kFirst = 4, kLast = 16;  // anchors

// Whatever is retained, truncated, forked and moved, and whoever the policy is: a step that has all
// the rest retrieved is exact, and what it retains is not read.
TEST_F(RetainTest, RandomCallsAnswerExactly) {
  Prepare("RetainRandom", 150);
  struct Forked {
    std::shared_ptr<Session> session;
    NaiveOwn rows = {};
    uint32_t n = 0;
  };
  std::vector<Forked> all;
  all.push_back({.session = AttachBounded(Everything("global"))});
  const auto upto = [&](uint32_t n) { return random_->Int(0, n - 1); };
  const std::vector<std::string> names = {"local", "gkv", "snapkv", "h2o", "tova", "window"};
  uint64_t deep = 0, forks = 0, retained = 0;
  for (int i = 0; i < 400 && !HasFailure(); ++i) {
    Forked& s = all[upto(uint32_t(all.size()))];
    const uint32_t what = upto(26);
    Session* const one[] = {s.session.get()};
    if (what < 8) {
      const uint32_t n = 1 + upto(180);
      AppendToAll(one, s.rows, n);
      s.n += n;
    } else if (what < 14) {
      Decode(*s.session, s.rows);
      ++s.n;
    } else if (what < 16 && s.n > 0) {
      const uint32_t block = 1 + upto(std::min(s.n, 40u));
      AttendBlock(*s.session, s.rows, upto(2), block, upto(s.n - block + 1));
    } else if (what < 18 && s.n > 0) {
      uint32_t n = upto(3) == 0 ? upto(s.n + 1) : s.n - std::min(s.n, upto(30));
      if (deep == 0 && i > 150) n = std::min(n, s.session->report()->own_moved / 2);
      if (n < s.session->report()->own_moved) ++deep;
      ASSERT_OK(s.session->Truncate(n));
      Shorten(s.rows, n, spec_.geometry);
      s.n = n;
    } else if (what < 20 && all.size() < 4) {
      AwaitMoves(*s.session);
      auto fork = s.session->Fork();
      ASSERT_OK(fork);
      EXPECT_EQ((*fork)->report()->own_retained, s.session->report()->own_retained);
      Forked copy = s;
      copy.session = *std::move(fork);
      all.push_back(std::move(copy));
      ++forks;
    } else if (what < 22) {
      StepPolicy policy = Everything(names[upto(uint32_t(names.size()))], upto(3) * 20);
      if (upto(3) == 0) policy.sharing = {.block = 4, .similarity = -1};
      if (upto(4) == 0) policy.k = 0;
      const bool exact = policy.k > 0;
      if (!exact) policy.estimator = EstimatorKind::kMoment;
      ASSERT_OK(s.session->SetPolicy(policy));
      Decode(*s.session, s.rows, exact);
      ++s.n;
      if (!exact) ASSERT_OK(s.session->SetPolicy(Everything("local")));
    } else if (what < 25) {
      AwaitMoves(*s.session);
    } else if (all.size() > 1) {
      if (&s != &all.back()) s = std::move(all.back());
      all.pop_back();
    }
    retained += all.front().session->report()->own_retained;
  }
  EXPECT_GT(deep, 0u);
  EXPECT_GT(forks, 2u);
  EXPECT_GT(retained, 100u);
  EXPECT_EQ(store_->Stats()->own_moves_failed, 0u);
  all.clear();
  EXPECT_TRUE(Soon([&] { return Used() == 0; }));
  EXPECT_OK(store_->Verify("", nullptr));
}

// A set that steps share holds what was read alone: what is retained is nobody's neighbour, and is
// joined anew in each step.
TEST_F(RetainTest, SharedSetsAreOfWhatIsRead) {
  options_.gathered_rows_bytes = 64 << 20;
  Prepare("RetainShared");
  for (const uint32_t k : {12u, 1u << 20}) {
    StepPolicy policy = Everything("local");
    policy.k = k;
    policy.sharing = {.block = 8, .similarity = -1, .dilation = 2};
    const auto session = AttachBounded(policy);
    NaiveOwn rows;
    Session* const all[] = {session.get()};
    for (int round = 0; round < 5 && !HasFailure(); ++round) {
      AppendToAll(all, rows, round == 0 ? 400 : 200);
      AwaitMoves(*session);
      const Ledger before = session->report()->total;
      for (int i = 0; i < 20; ++i) Decode(*session, rows, /*exact=*/k > 12);
      const SessionReport report = *session->report();
      EXPECT_EQ(report.own_retained, kRetained);
      const uint64_t steps = report.total.steps - before.steps;
      EXPECT_EQ(report.total.retained_tokens - before.retained_tokens, steps * kRetained);
      // k, and four neighbours of each of the best third.
      const uint64_t read = report.total.retrieved_tokens - before.retrieved_tokens;
      EXPECT_LE(read, steps * (uint64_t{k} + 4 * (k / 3)));
      EXPECT_GT(read, 0u);
    }
    const Ledger total = session->report()->total;
    EXPECT_LT(total.retrievals, total.selections / 4);
  }
}

// The scan estimator adds up the scores of all that is not attended to: with exact ones the
// log-sum-exp is that of everything, if every token counts once. So it is with moments of a single
// token.
TEST_F(RetainTest, WhatIsRetainedIsNotEstimated) {
  Prepare("RetainEstimated");
  for (const char* estimator : {"scan", "moment"}) {
    for (const uint32_t k : {0u, 9u}) {
      const bool scan = std::string(estimator) == "scan";
      SCOPED_TRACE(std::string(estimator) + ", k " + std::to_string(k));
      StepPolicy policy = Everything("local");
      policy.k = k;
      policy.selector = "exact";
      policy.estimator = *EstimatorVariant::Parse(estimator);
      const auto session = AttachBounded(policy);
      ASSERT_TRUE(session);
      NaiveOwn rows;
      Session* const all[] = {session.get()};
      double off = 0, count = 0;
      for (int round = 0; round < 4; ++round) {
        AppendToAll(all, rows, round == 0 ? 400 : 180);
        AwaitMoves(*session);
        if (!scan) {
          policy.k = prompt_.n_tokens + session->report()->own_moved - kFirst - kLast - 1;
          ASSERT_OK(session->SetPolicy(policy));
        }
        for (uint32_t l = 0; l < spec_.geometry.n_layers; ++l) {
          const LayerShape g = spec_.geometry.layer(l);
          const Token token = MakeTokens(l, g.n_kv_heads, 1);
          auto q = MakeQueries(l, g.n_kv_heads, 1);
          for (float& x : q) x *= 0.2f;
          State out = Room(l, g.n_kv_heads, 1);
          ASSERT_OK(session->StepAppend(l, q, token.k, token.v, out.y, out.lse, nullptr));
          Note(rows, l, All(l), 1, token);
          for (uint32_t h = 0; h < g.n_kv_heads; ++h) {
            auto whole = prompt_.Rows(l, h);
            const auto& own = rows.rows[{l, h}];
            whole.insert(whole.end(), own.begin(), own.end());
            const uint32_t group = g.group_size();
            const auto want = reference::ExactAttention(
                std::span(q).subspan(h * group * g.key_dim, group * g.key_dim), group,
                spec_.geometry.layers[l],
                {whole.data(), whole.size() / g.row().bytes(), g.row().bytes(), g.row()});
            for (uint32_t i = 0; i < group; ++i) {
              off = std::max(off, std::abs(double{out.lse[h * group + i]} - want.lse[i]));
              ++count;
            }
          }
        }
      }
      EXPECT_EQ(session->report()->own_retained, kRetained);
      EXPECT_GT(count, 0);
      // Were the retained tokens estimated as well, it would be off by 0.03.
      EXPECT_LT(off, scan ? 2e-4 : 2e-3);
    }
  }
}

// Without anything retrieved or estimated, the anchors and the retained tokens are what is left, as
// in the policies' papers.
TEST_F(RetainTest, RetainsWithoutRetrieving) {
  Prepare("RetainAlone");
  StepPolicy policy = Everything("local");
  policy.k = 0;
  const auto session = AttachBounded(policy);
  NaiveOwn rows;
  Session* const all[] = {session.get()};
  for (int round = 0; round < 4; ++round) {
    AppendToAll(all, rows, 150);
    Decode(*session, rows, /*exact=*/false);
    AwaitMoves(*session);
  }
  const SessionReport report = *session->report();
  ASSERT_EQ(report.own_retained, kRetained);
  const KvGeometry& g = spec_.geometry;
  for (uint32_t l = 0; l < g.n_layers; ++l) {
    const LayerShape shape = g.layer(l);
    const Token token = MakeTokens(l, shape.n_kv_heads, 1);
    const auto q = MakeQueries(l, shape.n_kv_heads, 1);
    State out = Room(l, shape.n_kv_heads, 1);
    ASSERT_OK(session->StepAppend(l, q, token.k, token.v, out.y, out.lse, nullptr));
    Note(rows, l, All(l), 1, token);
    for (uint32_t h = 0; h < shape.n_kv_heads; ++h) {
      const size_t bytes = shape.row().bytes();
      auto whole = prompt_.Rows(l, h);
      const auto& own = rows.rows[{l, h}];
      whole.insert(whole.end(), own.begin(), own.end());
      std::vector<std::byte> left;
      const auto take = [&](uint32_t t) {
        left.insert(left.end(), whole.begin() + ptrdiff_t(t * bytes),
                    whole.begin() + ptrdiff_t((t + 1) * bytes));
      };
      for (uint32_t t = 0; t < kFirst; ++t) take(t);
      for (const uint32_t t : Retained(*session, g.heads().of(l, h))) take(prompt_.n_tokens + t);
      const uint32_t behind = prompt_.n_tokens + report.own_moved - kLast;
      for (uint32_t t = behind; t < whole.size() / bytes; ++t) take(t);
      const uint32_t group = shape.group_size();
      const auto want = reference::ExactAttention(
          std::span(q).subspan(h * group * shape.key_dim, group * shape.key_dim), group,
          g.layers[l], {left.data(), left.size() / bytes, bytes, shape.row()});
      for (uint32_t i = 0; i < group * shape.value_dim; ++i) {
        EXPECT_NEAR(out.y[h * group * shape.value_dim + i], want.y[i], 1e-5 * want.abs_y[i] + 1e-6);
      }
    }
  }
}

// A truncation to nothing gives the memory back, and a policy that retains nothing as well.
TEST_F(RetainTest, MemoryGoesWithWhatItHeld) {
  Prepare("RetainMemory");
  const auto session = AttachBounded(Everything("local"));
  NaiveOwn rows;
  Session* const all[] = {session.get()};
  AppendToAll(all, rows, 600);
  AwaitMoves(*session);
  EXPECT_EQ(session->report()->own_retained, kRetained);
  ASSERT_OK(session->Truncate(0));
  EXPECT_EQ(session->report()->own_retained, 0u);
  EXPECT_TRUE(Soon([&] { return Used() == 0; })) << Used();
  AppendToAll(all, rows, 600);
  AwaitMoves(*session);
  EXPECT_EQ(session->report()->own_retained, kRetained);
  const uint64_t before = Used();
  ASSERT_OK(session->SetPolicy(Everything("local", 0)));
  EXPECT_EQ(session->report()->own_retained, 0u);
  EXPECT_TRUE(Soon([&] { return Used() < before; }));
}

// What a move could not do for want of something it tries again with nothing retained, and the next
// one retains again.
TEST_F(RetainTest, AfterAFailureAMoveRetainsNothing) {
  const auto refused = std::make_shared<std::atomic<int>>(0);
  PrepareWatched("RetainFailure", [&](testing::WatchedStore& store) {
    store.before_put = [refused](std::span<const uint32_t>,
                                 const storage::PutOptions& options) -> Status {
      if (!options.live || refused->fetch_add(1) != 1) return {};
      return Error{Code::kUnavailable, "the disk is away"};
    };
  });
  const auto session = AttachBounded(Everything("local"));
  NaiveOwn rows;
  Session* const all[] = {session.get()};
  std::vector<uint32_t> retained;
  const auto settled = [&] {
    const SessionReport report = *session->report();
    return report.own_tokens <= report.own_moved + kMemory;
  };
  for (int round = 0; round < 3; ++round) {
    AppendToAll(all, rows, 2 * kMemory);
    if (round == 1) {
      EXPECT_TRUE(Soon([&] { return store_->Stats()->own_moves_failed == 1; }));
      // It is tried again when something is appended a second later: by too few tokens for a move
      // behind that one.
      for (int i = 0; i < 50 && !settled(); ++i) {
        Decode(*session, rows, /*exact=*/false);
        std::this_thread::sleep_for(std::chrono::milliseconds(600));
      }
    }
    AwaitMoves(*session);
    retained.push_back(session->report()->own_retained);
  }
  EXPECT_EQ(retained, (std::vector<uint32_t>{kRetained, 0, kRetained}));
}

}  // namespace
}  // namespace prefixd
