// Tests sessions that keep a bounded number of own tokens in memory: whatever moves, and when, they
// answer as lists of all rows do, with attention in float64.
#include <algorithm>
#include <cmath>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "tests/runtime/step/own_memory_fixture.h"

namespace prefixd {
namespace {

using testing::kFull;
using testing::kMemory;
using testing::NaiveOwn;
using testing::OwnMemoryTest;
using testing::WatchedStore;

TEST_F(OwnMemoryTest, LongGenerationAnswersExactlyInBoundedMemory) {
  Prepare("OwnMemoryLong");
  auto session = AttachBounded(kFull);
  NaiveOwn rows;
  Session* const all[] = {session.get()};
  const uint64_t chunk = 64 * spec_.geometry.row(0).bytes() + 256;
  for (int round = 0; round < 40 && !HasFailure(); ++round) {
    AppendToAll(all, rows, 97);
    Decode(*session, rows);
    AwaitMoves(*session);
    // 4 heads of as many chunks as there may be tokens, and one that is not full at each end.
    EXPECT_TRUE(Soon([&] { return Used() <= 4 * (kMemory / 64 + 2) * chunk; })) << Used();
  }
  const SessionReport report = *session->report();
  EXPECT_EQ(report.own_tokens, 40u * 98);
  EXPECT_GE(report.own_moved, 40u * 98 - kMemory);
  EXPECT_EQ(session->info().n_tokens, prompt_.n_tokens);
  const RuntimeStats stats = *store_->Stats();
  EXPECT_GT(stats.own_moves, 15u);
  EXPECT_EQ(stats.own_moved_tokens, report.own_moved);
  EXPECT_EQ(stats.own_moves_failed, 0u);
  // Segments of moved tokens are joined: as many as there are bits in their number, not moves; with
  // the prompt's, and perhaps one that is about to go.
  EXPECT_TRUE(Soon([&] { return Stored() <= 8; })) << Stored();
  // Blocks of questions, in memory and before.
  for (const uint32_t after : {0u, 100u, 700u, 3800u}) AttendBlock(*session, rows, 1, 60, after);
  // All of it is the session's alone.
  const auto page = store_->ListPrefixes({});
  ASSERT_OK(page);
  EXPECT_EQ(page->prefixes.size(), 1u);
  ASSERT_OK(session->Detach());
  ExpectNothingLeft();
  EXPECT_OK(store_->Verify("", nullptr));
}

// Under a budget the moved tokens are retrieved and estimated: with all of them retrieved the
// answer is exact, with few it stays near that of a session whose own tokens are all in memory.
TEST_F(OwnMemoryTest, MovedTokensAreRetrievedAndEstimated) {
  Prepare("OwnMemorySparse");
  const StepPolicy everything = {.estimator = EstimatorKind::kNone, .k = 1u << 20};
  auto session = AttachBounded(everything);
  NaiveOwn rows;
  Session* const all[] = {session.get()};
  for (int round = 0; round < 10; ++round) {
    AppendToAll(all, rows, 200);
    AwaitMoves(*session);
    Decode(*session, rows);
  }
  ASSERT_OK(session->SetPolicy({.estimator = EstimatorKind::kMoment, .budget = 0.2}));
  double error = 0, scale = 0;
  for (int i = 0; i < 50; ++i) {
    const uint32_t l = i % 2;
    const LayerShape g = spec_.geometry.layer(l);
    const Token token = MakeTokens(l, g.n_kv_heads, 1);
    auto q = MakeQueries(l, g.n_kv_heads, 1);
    for (float& x : q) x *= 0.3f;
    State out = Room(l, g.n_kv_heads, 1);
    StepInfo info;
    ASSERT_OK(session->StepAppend(l, q, token.k, token.v, out.y, out.lse, &info));
    EXPECT_GT(info.k, 0u);
    EXPECT_LT(info.k, 500u);
    Note(rows, l, All(l), 1, token);
    for (uint32_t h = 0; h < g.n_kv_heads; ++h) {
      auto bytes = prompt_.Rows(l, h);
      bytes.insert(bytes.end(), rows.rows[{l, h}].begin(), rows.rows[{l, h}].end());
      const uint32_t group = g.group_size();
      const auto want = reference::ExactAttention(
          std::span(q).subspan(h * group * g.key_dim, group * g.key_dim), group,
          spec_.geometry.layers[l],
          {bytes.data(), bytes.size() / g.row().bytes(), g.row().bytes(), g.row()});
      for (size_t e = 0; e < group * g.value_dim; ++e) {
        const double d = out.y[h * group * g.value_dim + e] - want.y[e];
        error += d * d;
        scale += want.y[e] * want.y[e];
      }
    }
  }
  EXPECT_LT(std::sqrt(error / scale), 0.5);
  // Layers of mode anchors read no more than those: it still answers.
  ASSERT_OK(session->SetPolicy({.mode = StepMode::kAnchors}));
  Decode(*session, rows, false);
}

// The store's encoding is for prompts: own tokens are exact whether they have moved or not.
TEST_F(OwnMemoryTest, MovedRowsAreStoredAsTheyWereGiven) {
  options_.encoding = "int8";
  Prepare("OwnMemoryEncoding");
  auto bounded = AttachBounded(kFull);
  const auto plain =
      store_->Attach({.model = spec_.name, .tokens = prompt_.tokens, .policy = kFull});
  ASSERT_OK(plain);
  NaiveOwn rows;
  Session* const both[] = {bounded.get(), plain->get()};
  for (int round = 0; round < 4; ++round) {
    AppendToAll(both, rows, 200);
    AwaitMoves(*bounded);
  }
  EXPECT_GT(bounded->report()->own_moved, 0u);
  const uint32_t heads = spec_.geometry.layer(1).n_kv_heads;
  const Token token = MakeTokens(1, heads, 1);
  const auto q = MakeQueries(1, heads, 1);
  State moved = Room(1, heads, 1), whole = Room(1, heads, 1);
  ASSERT_OK(bounded->StepAppend(1, q, token.k, token.v, moved.y, moved.lse, nullptr));
  ASSERT_OK((*plain)->StepAppend(1, q, token.k, token.v, whole.y, whole.lse, nullptr));
  for (size_t i = 0; i < whole.y.size(); ++i) EXPECT_NEAR(moved.y[i], whole.y[i], 1e-5) << i;
}

TEST_F(OwnMemoryTest, RefusesWhatIsOfThePrefixAlone) {
  Prepare("OwnMemoryRefusals");
  for (const uint32_t tokens : {1u, kMemory - 1}) {
    EXPECT_CODE(store_->Attach(
                    {.model = spec_.name, .tokens = prompt_.tokens, .own_memory_tokens = tokens}),
                Code::kInvalidArgument);
  }
  const auto session = AttachBounded({.k = 8});
  EXPECT_EQ(session->info().own_memory_tokens, kMemory);
  const auto q = MakeQueries(0, 2, 1);
  State out = Room(0, 2, 1);
  ASSERT_OK(session->Step(0, q, out.y, out.lse, nullptr));  // it has none yet
  const Token first = MakeTokens(1, 1, 1);
  ASSERT_OK(session->Append(1, {1, 1}, 1, first.k, first.v));
  EXPECT_CODE(session->Step(0, q, out.y, out.lse, nullptr), Code::kFailedPrecondition);
  EXPECT_CODE(session->Select(0, 0, std::span(q).first(32), 4), Code::kFailedPrecondition);
  EXPECT_CODE(session->MomentBytes(0, 0), Code::kFailedPrecondition);
  // Rows of the prefix are read as ever, whatever lies behind them.
  ASSERT_OK(session->Truncate(0));
  NaiveOwn rows;
  Session* const all[] = {session.get()};
  AppendToAll(all, rows, 1000);
  AwaitMoves(*session);
  const uint32_t n = prompt_.n_tokens;
  std::vector<std::byte> row(spec_.geometry.row(0).bytes());
  ASSERT_OK(session->ReadRange(0, 0, {n - 1, n}, row));
  EXPECT_CODE(session->ReadRange(0, 0, {n, n + 1}, row), Code::kInvalidArgument);
  EXPECT_CODE(session->Truncate(1001), Code::kInvalidArgument);
}

// Random calls on some sessions and their forks, while the background moves what it may.
TEST_F(OwnMemoryTest, RandomCallsKeepWhatListsOfRowsKeep) {
  WatchedStore* storage = nullptr;
  PrepareWatched(
      "OwnMemoryRandom", [&](WatchedStore& store) { storage = &store; }, 150);
  struct Seen {
    std::shared_ptr<Session> session;
    NaiveOwn rows = {};
    uint32_t n = 0;          // of all heads
    uint32_t persisted = 0;  // of the first of them
    std::vector<uint32_t> ids = {};
  };
  std::vector<Seen> all;
  all.push_back({.session = AttachBounded(kFull)});
  const auto upto = [&](uint32_t n) { return random_->Int(0, n - 1); };
  uint64_t deep = 0, forks = 0, persists = 0;
  for (int i = 0; i < 400 && !HasFailure(); ++i) {
    Seen& s = all[upto(uint32_t(all.size()))];
    const uint32_t what = upto(28);
    Session* const one[] = {s.session.get()};
    if (what < 9) {
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
      const uint32_t n = upto(3) == 0 ? upto(s.n + 1) : s.n - std::min(s.n, upto(30));
      if (n < s.session->report()->own_moved) ++deep;
      ASSERT_OK(s.session->Truncate(n));
      Shorten(s.rows, n, spec_.geometry);
      s.n = n;
      s.persisted = std::min(s.persisted, n);
      s.ids.resize(std::min<size_t>(s.ids.size(), n));
      EXPECT_EQ(s.session->report()->own_tokens, n);
      EXPECT_LE(s.session->report()->own_moved, n);
    } else if (what < 20 && all.size() < 5) {
      auto fork = s.session->Fork();
      ASSERT_OK(fork);
      EXPECT_EQ((*fork)->info().n_tokens, prompt_.n_tokens);
      EXPECT_EQ((*fork)->info().prefix, s.session->info().prefix);
      EXPECT_EQ((*fork)->report()->own_tokens, s.n);
      Seen copy = s;
      copy.session = *std::move(fork);
      all.push_back(std::move(copy));
      ++forks;
    } else if (what < 21) {
      ASSERT_OK(s.session->SetPolicy({.estimator = EstimatorKind::kNone, .k = 4}));
      Decode(*s.session, s.rows, false);
      ++s.n;
      ASSERT_OK(s.session->SetPolicy(kFull));
    } else if (what < 22 && s.n > 0) {
      const uint32_t n = 1 + upto(s.n);
      while (s.ids.size() < n) s.ids.push_back(random_->Int(1, 1u << 30));
      const auto done = s.session->Persist(std::span(s.ids).first(n));
      ASSERT_OK(done);
      EXPECT_EQ(done->n_tokens, prompt_.n_tokens + n);
      // What was stored is served byte for byte.
      const auto reader = store_->Attach({.model = spec_.name,
                                          .prefix = done->prefix,
                                          .n_tokens = prompt_.n_tokens + n,
                                          .policy = kFull,
                                          .accept_approximate = true});
      ASSERT_OK(reader);
      const RowShape row = spec_.geometry.row(1);
      std::vector<std::byte> got(n * row.bytes());
      ASSERT_OK((*reader)->ReadRange(1, 1, {prompt_.n_tokens, prompt_.n_tokens + n}, got));
      EXPECT_TRUE(std::equal(got.begin(), got.end(), s.rows.rows[{1, 1}].begin()));
      s.persisted = n;
      ++persists;
    } else if (what < 23 && s.persisted > 0) {
      // A session of its own prefix: only its first answers are looked at.
      auto next = s.session->ForkPersisted(upto(300));
      ASSERT_OK(next);
      const uint32_t moved = (*next)->info().n_tokens - prompt_.n_tokens;
      EXPECT_EQ((*next)->report()->own_tokens, s.n - moved);
      NaiveOwn rows = s.rows;
      Decode(**next, rows);
    } else if (what >= 24) {
      // Otherwise what follows comes while they move.
      AwaitMoves(*s.session);
    } else if (all.size() > 1) {
      if (upto(2) == 0) ASSERT_OK(s.session->Detach());
      if (&s != &all.back()) s = std::move(all.back());
      all.pop_back();
    }
  }
  EXPECT_GT(deep, 0u);
  EXPECT_GT(forks, 3u);
  EXPECT_GT(persists, 3u);
  EXPECT_GT(store_->Stats()->own_moves, 10u);
  EXPECT_EQ(store_->Stats()->own_moves_failed, 0u);
  all.clear();
  EXPECT_TRUE(Soon([&] { return Used() == 0; }));
  EXPECT_OK(store_->Verify("", nullptr));
  // What was persisted stays; what was not goes.
  std::set<std::string> chains;
  EXPECT_TRUE(Soon([&] {
    chains.clear();
    const auto page = store_->ListPrefixes({});
    for (const auto& prefix : page->prefixes) {
      const auto detail = store_->Prefix(prefix.id);
      if (detail.ok()) chains.insert(detail->chain.begin(), detail->chain.end());
    }
    return Stored() == chains.size();
  })) << Stored()
      << " segments, " << chains.size() << " of them of prefixes";
  for (const storage::PrefixInfo& left : storage->inner().ListPrefixes({})) {
    EXPECT_TRUE(chains.contains(left.id.ToString()) || !left.live)
        << left.id.ToString() << ": tokens " << left.n_tokens - left.own_tokens << " to "
        << left.n_tokens << ", listed " << left.listed << ", children " << left.children;
  }
}

}  // namespace
}  // namespace prefixd
