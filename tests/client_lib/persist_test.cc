// Tests what sessions persist on every kind of client, against an embedded session that does the
// same; tests/runtime/step/persist_test.cc holds that one against float64.
#include <csignal>
#include <thread>

#include "tests/client_lib/own_tokens.h"

namespace prefixd::testing {
namespace {

class Persisting : public OwnTokens {
 protected:
  static std::vector<uint32_t> IdsOf(uint32_t n) {
    std::vector<uint32_t> ids(n);
    for (uint32_t i = 0; i < n; ++i) ids[i] = 70000 + i;
    return ids;
  }
  std::vector<uint32_t> Behind(uint32_t n) const {
    std::vector<uint32_t> all = prompt_.tokens;
    const auto own = IdsOf(n);
    all.insert(all.end(), own.begin(), own.end());
    return all;
  }
  // Persists the own tokens behind the first `moved` in both; returns the client's result.
  PutResult PersistBoth(Session& mine, Session& theirs, uint32_t moved, uint32_t n,
                        const PersistSpec& spec = {}) {
    const auto all = IdsOf(moved + n);
    const auto ids = std::span(all).subspan(moved);
    const auto done = mine.Persist(ids, spec), want = theirs.Persist(ids, spec);
    EXPECT_TRUE(done.ok() && want.ok()) << StatusOf(done).error().message;
    if (!done.ok() || !want.ok()) return {};
    EXPECT_EQ(done->n_tokens, want->n_tokens);
    EXPECT_EQ(done->stored_tokens, want->stored_tokens);
    EXPECT_EQ(done->exact_tokens, want->exact_tokens);
    EXPECT_EQ(done->lineage.empty(), want->lineage.empty());
    EXPECT_GT(done->bytes, 0u);
    const ProgressFn patient = [](uint64_t, uint64_t, std::string_view) { return true; };
    EXPECT_TRUE(client_->WaitReady(done->prefix, patient).ok());
    EXPECT_TRUE(reference_->WaitReady(want->prefix, patient).ok());
    return *done;
  }
  uint32_t Matched(uint32_t n, const std::string& lineage) {
    const auto match =
        client_->Match({.model = prompt_.model.name, .tokens = Behind(n), .lineage = lineage});
    EXPECT_TRUE(match.ok());
    return match.ok() ? match->n_tokens : 0;
  }
  void Restart(int signal) {
    daemon_->Signal(signal);
    daemon_->Wait();
    const std::string listen = daemon_->tcp_address().substr(4);
    daemon_ =
        std::make_unique<DaemonProcess>(dir_.path(), std::vector<std::string>{"--listen", listen});
    ASSERT_TRUE(daemon_->ready()) << daemon_->Stderr();
  }
};

TEST_P(Persisting, SessionsGoOnOverWhatTheyStored) {
  Put(*client_);
  auto mine = Attach(*client_), theirs = Attach(*reference_);
  ASSERT_TRUE(mine && theirs);
  const uint64_t seed = Seed("Persisting");
  for (uint32_t layer = 0; layer < 2; ++layer) {
    AppendBoth(*mine, *theirs, layer, 60, seed + 10 * layer);
  }
  std::string lineage;
  uint32_t moved = 0, own = 60;
  for (int round = 0; round < 3; ++round) {
    for (uint32_t t = 0; t < 8; ++t) {
      for (uint32_t layer = 0; layer < 2; ++layer) {
        StepBoth(*mine, *theirs, layer, seed + 1000 * t + 10 * layer);
      }
    }
    own += 8;
    const PutResult done =
        PersistBoth(*mine, *theirs, moved, own, {.label = "round", .pinned = true});
    EXPECT_EQ(done.stored_tokens, round == 0 ? 68 : 8);
    EXPECT_EQ(done.exact_tokens, kTokens + 60);
    if (round > 0) {
      EXPECT_EQ(done.lineage, lineage);
    }
    lineage = done.lineage;
    EXPECT_EQ(Matched(moved + own, ""), kTokens + 60);
    EXPECT_EQ(Matched(moved + own, lineage), kTokens + moved + own);
    const auto detail = client_->Prefix(done.prefix);
    ASSERT_TRUE(detail.ok());
    EXPECT_EQ(detail->summary.label, "round");
    EXPECT_TRUE(detail->summary.pinned);
    auto next = mine->ForkPersisted(3), their_next = theirs->ForkPersisted(3);
    ASSERT_TRUE(next.ok() && their_next.ok()) << StatusOf(next).error().message;
    ASSERT_TRUE(mine->Detach().ok());
    ASSERT_TRUE(theirs->Detach().ok());
    mine = *next, theirs = *their_next;
    moved += own - 3, own = 3;
    EXPECT_EQ(mine->info().n_tokens, kTokens + moved);
    EXPECT_EQ(mine->info().exact_tokens, kTokens + 60);
    EXPECT_EQ(mine->policy().k, theirs->policy().k);
    EXPECT_EQ(mine->report()->own_tokens, own);
  }
  // Its forks and batches are as any session's.
  auto fork = mine->Fork(), their_fork = theirs->Fork();
  ASSERT_TRUE(fork.ok() && their_fork.ok());
  ASSERT_TRUE(mine->Truncate(1).ok());
  ASSERT_TRUE(theirs->Truncate(1).ok());
  StepBoth(*mine, *theirs, 0, seed + 1);
  StepBoth(**fork, **their_fork, 0, seed + 2);
  for (const auto& session : {mine, *fork}) ASSERT_TRUE(session->Detach().ok());
  const auto stats = client_->Stats();
  ASSERT_TRUE(stats.ok());
  EXPECT_EQ(stats->sessions, 0u);
  for (const MemoryOfKind& m : stats->memory_kinds) {
    EXPECT_TRUE(m.kind != "own_tokens" || m.bytes == 0) << m.bytes;
  }
}

// What was persisted is a session's prefix, and outlives the daemon as that does.
TEST_P(Persisting, TheyAttachAgainAfterARestart) {
  if (GetParam() == Kind::kEmbedded || GetParam() == Kind::kTls) return;
  Put(*client_);
  const auto mine = Attach(*client_), theirs = Attach(*reference_);
  for (uint32_t layer = 0; layer < 2; ++layer) {
    StepBoth(*mine, *theirs, layer, 1);
    AppendBoth(*mine, *theirs, layer, 40, 7);
  }
  const PutResult done = PersistBoth(*mine, *theirs, 0, 41);
  EXPECT_EQ(done.exact_tokens, kTokens);
  const auto bare = mine->ForkPersisted(0), with_own = mine->ForkPersisted(5);
  const auto their_bare = theirs->ForkPersisted(0);
  ASSERT_TRUE(bare.ok() && with_own.ok() && their_bare.ok());
  Restart(SIGKILL);
  StepBoth(**bare, **their_bare, 0, 3);  // it has no own tokens, and attaches again
  const auto q = Queries(1, 5);
  Answer out = Room(1);
  const Status lost = (*with_own)->Step(0, q, out.y, out.lse, nullptr);
  EXPECT_EQ(lost.error().code, Code::kUnavailable);
  const auto ids = IdsOf(41);
  const auto again = mine->Persist(ids);
  ASSERT_FALSE(again.ok());
  EXPECT_EQ(again.error().code, Code::kUnavailable);
  EXPECT_NE(again.error().message.find("its own tokens ended"), std::string::npos);
  EXPECT_EQ(Matched(41, done.lineage), kTokens + 41);
}

// Rows in several batches, beside other calls of the same client.
TEST_P(Persisting, LargeOnesRunBesideOtherCalls) {
  Put(*client_);
  const auto mine = Attach(*client_, {.mode = StepMode::kFull}),
             theirs = Attach(*reference_, {.mode = StepMode::kFull});
  for (uint32_t layer = 0; layer < 2; ++layer) AppendBoth(*mine, *theirs, layer, 40000, layer);
  const auto ids = IdsOf(40000);
  Result<PutResult> done = Error{};
  std::thread persist([&] { done = mine->Persist(ids); });
  const auto other = Attach(*client_);
  for (int i = 0; i < 20; ++i) EXPECT_TRUE(Step(*other, 0, kQ, kY, kLse).ok());
  persist.join();
  ASSERT_TRUE(done.ok()) << done.error().message;
  EXPECT_EQ(done->stored_tokens, 40000u);
  EXPECT_EQ(done->exact_tokens, kTokens + 40000u);
  ASSERT_TRUE(theirs->Persist(ids).ok());
  const auto next = mine->ForkPersisted(0), their_next = theirs->ForkPersisted(0);
  ASSERT_TRUE(next.ok() && their_next.ok());
  for (uint32_t layer = 0; layer < 2; ++layer) StepBoth(**next, **their_next, layer, 9);
}

TEST_P(Persisting, EqualPutsAreWaitedFor) {
  Put(*client_);
  const auto mine = Attach(*client_, {.mode = StepMode::kFull}),
             theirs = Attach(*reference_, {.mode = StepMode::kFull});
  for (uint32_t layer = 0; layer < 2; ++layer) AppendBoth(*mine, *theirs, layer, 30, layer);
  const auto ids = IdsOf(30);
  auto other = client_->BeginPut({.model = prompt_.model.name, .tokens = Behind(30)});
  ASSERT_TRUE(other.ok());
  for (const uint32_t wait_ms : {0u, 60u}) {
    const auto alone = mine->Persist(ids, {.wait_ms = wait_ms, .alone = true});
    ASSERT_FALSE(alone.ok());
    EXPECT_EQ(alone.error().code, Code::kUnavailable);
    EXPECT_NE(alone.error().message.find("another put of these tokens is under way"),
              std::string::npos);
  }
  Result<PutResult> done = Error{};
  std::thread persist([&] { done = mine->Persist(ids, {.wait_ms = 60000}); });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  (*other)->Abort();
  persist.join();
  ASSERT_TRUE(done.ok()) << done.error().message;
  EXPECT_EQ(done->stored_tokens, 30u);
}

TEST_P(Persisting, RefusalsAreTheSameEverywhere) {
  const auto append = [this](Session& s, uint32_t layer, HeadRange heads) {
    const auto rows = Rows(20, heads.n, 4);
    return s.Append(layer, heads, 20, rows, rows);
  };
  const auto persist = [](Session& s, uint32_t n, const PersistSpec& spec = {}) {
    return StatusOf(s.Persist(IdsOf(n), spec));
  };
  const Code kArgument = Code::kInvalidArgument, kState = Code::kFailedPrecondition;
  ExpectRefused({
      {"no own tokens", kArgument, [&](auto&, auto& s) { return persist(s, 1); }},
      {"nothing stored", kState, [&](auto&, auto& s) { return StatusOf(s.ForkPersisted(0)); }},
      {"a layer lacks them", kState,
       [&](auto&, auto& s) {
         if (Status first = append(s, 0, {0, 2}); !first.ok()) return first;
         return persist(s, 20);
       }},
      {"a head lacks them", kState,
       [&](auto&, auto& s) {
         if (Status first = append(s, 1, {1, 1}); !first.ok()) return first;
         return persist(s, 20);
       }},
      {"no ids", kArgument, [&](auto&, auto& s) { return persist(s, 0); }},
      {"too many ids", kArgument,
       [&](auto&, auto& s) {
         if (Status first = append(s, 1, {0, 1}); !first.ok()) return first;
         return persist(s, 21);
       }},
      {"label", kArgument,
       [&](auto&, auto& s) { return persist(s, 20, {.label = std::string(5000, 'x')}); }},
      {"lifetime", kArgument,
       [&](auto&, auto& s) { return persist(s, 20, {.ttl_seconds = 1ull << 60}); }},
      {"truncated since", kState,
       [&](auto&, auto& s) {
         if (Status first = persist(s, 20); !first.ok()) return first;
         if (Status first = s.Truncate(0); !first.ok()) return first;
         return StatusOf(s.ForkPersisted(0));
       }},
      {"detached", kState,
       [&](auto&, auto& s) {
         (void)s.Detach();
         return persist(s, 20);
       }},
      {"a fork of a detached one", kState,
       [&](auto&, auto& s) { return StatusOf(s.ForkPersisted(0)); }},
  });
}

INSTANTIATE_TEST_SUITE_P(Clients, Persisting, EveryKind(), KindName);

}  // namespace
}  // namespace prefixd::testing
