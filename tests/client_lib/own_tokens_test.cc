// Tests own tokens of sessions on every kind of client, against an embedded session that appends
// the same; tests/runtime/step/own_tokens_test.cc holds that one against float64.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstring>
#include <thread>

#include "tests/client_lib/own_tokens.h"
#include "tests/support/expect_ok.h"

namespace prefixd::testing {
namespace {

TEST_P(OwnTokens, AppendStepTruncateAndFork) {
  Put(*client_);
  const auto mine = Attach(*client_), theirs = Attach(*reference_);
  ASSERT_TRUE(mine && theirs);
  const uint64_t seed = Seed("OwnTokens");
  AppendBoth(*mine, *theirs, 0, 75, seed);
  ExactBoth(*mine, *theirs, 0, 75, seed + 5);
  for (uint32_t t = 0; t < 80; ++t) {
    StepBoth(*mine, *theirs, t % 2, seed + 100 * t, t % 3 == 0);
    if (HasFailure()) return;
  }
  EXPECT_EQ(mine->report()->own_tokens, 115u);
  // A plain step sees the prefix alone.
  const auto q = Queries(1, seed);
  Answer a = Room(1), b = Room(1);
  ASSERT_TRUE(mine->Step(0, q, a.y, a.lse, nullptr).ok());
  const auto plain = Attach(*reference_);
  ASSERT_TRUE(plain->Step(0, q, b.y, b.lse, nullptr).ok());
  ExpectNear(a.y, b.y);

  auto fork = mine->Fork(), their_fork = theirs->Fork();
  ASSERT_TRUE(fork.ok() && their_fork.ok()) << fork.error().message;
  EXPECT_EQ((*fork)->report()->own_tokens, 115u);
  EXPECT_EQ((*fork)->info().n_tokens, kTokens);
  EXPECT_EQ((*fork)->policy().k, mine->policy().k);
  ASSERT_TRUE(mine->Truncate(70).ok());
  ASSERT_TRUE(theirs->Truncate(70).ok());
  for (uint32_t t = 0; t < 10; ++t) {
    StepBoth(*mine, *theirs, 0, seed + 7000 + t);
    StepBoth(**fork, **their_fork, 0, seed + 8000 + t);
  }
  EXPECT_EQ(mine->report()->own_tokens, 80u);
  EXPECT_EQ((*fork)->report()->own_tokens, 125u);
  ASSERT_TRUE((*fork)->Detach().ok());
  StepBoth(*mine, *theirs, 1, seed + 9000);
  ASSERT_TRUE(mine->Truncate(0).ok());
  EXPECT_EQ(mine->report()->own_tokens, 0u);
  ASSERT_TRUE(mine->Detach().ok());
  const auto stats = client_->Stats();
  ASSERT_TRUE(stats.ok());
  EXPECT_EQ(stats->sessions, 0u);
  for (const MemoryOfKind& m : stats->memory_kinds) {
    EXPECT_TRUE(m.kind != "own_tokens" || m.bytes == 0) << m.bytes;
  }
}

// Blocks that take several messages, over whichever connection has small ones.
TEST_P(OwnTokens, LargeBlocksAreSplit) {
  Put(*client_);
  const auto mine = Attach(*client_), theirs = Attach(*reference_);
  ASSERT_TRUE(mine && theirs);
  AppendBoth(*mine, *theirs, 1, 10000, Seed("OwnLarge"));
  AppendBoth(*mine, *theirs, 1, 700, Seed("OwnLarge") + 2);
  ExactBoth(*mine, *theirs, 1, 1600, Seed("OwnLarge") + 4);
  EXPECT_EQ(mine->report()->own_tokens, 10700u);
}

// Whether it was refused before its first token or in the middle: the same again appends the rest.
TEST_P(OwnTokens, ALargeBlockThatFailsMayBeRepeated) {
  constexpr uint32_t kBlock = 10000;
  Put(*client_);
  const auto mine = Attach(*client_), theirs = Attach(*reference_);
  ASSERT_TRUE(mine && theirs);
  const auto k = Rows(kBlock, 2, Seed("OwnAgain")), v = Rows(kBlock, 2, Seed("OwnAgain") + 1);
  auto bad = v;
  const uint16_t nan = 0x7fc0;
  std::memcpy(&bad[bad.size() - 2], &nan, 2);
  for (const uint32_t blocks : {1u, 2u}) {
    for (int i = 0; i < 2; ++i)
      EXPECT_CODE(mine->Append(1, kBlock, k, bad), Code::kInvalidArgument);
    // What has gone back does not go on.
    if (blocks == 2) ASSERT_OK(mine->Truncate(kBlock));
    ASSERT_OK(mine->Append(1, kBlock, k, v));
    ASSERT_OK(theirs->Append(1, kBlock, k, v));
    EXPECT_EQ(mine->report()->own_tokens, blocks * kBlock);
    ExactBoth(*mine, *theirs, 1, 50, Seed("OwnAgain") + 2);
  }
}

// An answer of 20,000 tokens, of which some 2,000 are in memory at a time.
TEST_P(OwnTokens, LongAnswersTakeBoundedMemory) {
  constexpr uint32_t kMemory = 2000, kBlock = 499, kRounds = 40;
  const StepPolicy full = {.mode = StepMode::kFull};
  Put(*client_);
  const auto mine = Attach(*client_, full, kMemory), theirs = Attach(*reference_, full);
  ASSERT_TRUE(mine && theirs);
  EXPECT_EQ(mine->info().own_memory_tokens, kMemory);
  const uint64_t seed = Seed("OwnLong");
  const auto in_memory = [&] {
    const SessionReport report = *mine->report();
    return report.own_tokens - report.own_moved;
  };
  const auto own_bytes = [&] {
    const auto stats = client_->Stats();
    uint64_t bytes = 0;
    for (const MemoryOfKind& m : stats->memory_kinds) bytes += m.kind == "own_tokens" ? m.bytes : 0;
    return bytes;
  };
  // Rows of bf16, of two heads in each of two layers; the shares of unfilled chunks. The thread
  // that moved rows frees them a moment after they count as moved.
  constexpr uint64_t kBound = (kMemory + kBlock + 200) * 4 * 2 * kDim * sizeof(uint16_t);
  const auto settled = [&] {
    for (int i = 0; i < 30000; ++i) {
      if (in_memory() <= kMemory && own_bytes() < kBound) return true;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return false;
  };
  for (uint32_t r = 0; r < kRounds && !HasFailure(); ++r) {
    for (uint32_t layer = 0; layer < 2; ++layer) {
      AppendBoth(*mine, *theirs, layer, kBlock, seed + 10 * r + layer);
      StepBoth(*mine, *theirs, layer, seed + 10 * r + 2 + layer);
    }
    ASSERT_TRUE(settled()) << in_memory() << " tokens, " << own_bytes() << " bytes";
  }
  EXPECT_EQ(mine->report()->own_tokens, kRounds * (kBlock + 1));
  EXPECT_EQ(mine->info().n_tokens, kTokens);
  EXPECT_GT(client_->Stats()->own_moves, 10u);
  ExactBoth(*mine, *theirs, 0, 300, seed + 5000);
  ASSERT_TRUE(mine->Truncate(7000).ok());
  ASSERT_TRUE(theirs->Truncate(7000).ok());
  StepBoth(*mine, *theirs, 0, seed + 5100);
  StepBoth(*mine, *theirs, 1, seed + 5200);
  // Under a budget moved tokens are retrieved or estimated as the prefix is.
  ASSERT_TRUE(mine->SetPolicy({.estimator = EstimatorKind::kMoment, .budget = 0.05}).ok());
  double error = 0, scale = 0;
  for (uint32_t t = 0; t < 40; ++t) {
    auto q = Queries(1, seed + 6000 + t);
    for (float& x : q) x *= 0.3f;
    const auto k = Rows(1, 2, seed + 6100 + t), v = Rows(1, 2, seed + 6200 + t);
    Answer a = Room(1), b = Room(1);
    StepInfo info;
    ASSERT_TRUE(mine->StepAppend(t % 2, q, k, v, a.y, a.lse, &info).ok());
    ASSERT_TRUE(theirs->StepAppend(t % 2, q, k, v, b.y, b.lse, nullptr).ok());
    EXPECT_LT(info.k, 600u);
    for (size_t i = 0; i < a.y.size(); ++i) {
      error += std::pow(a.y[i] - b.y[i], 2);
      scale += std::pow(b.y[i], 2);
    }
  }
  EXPECT_LT(std::sqrt(error / scale), 0.5);
  const auto fork = mine->Fork();
  ASSERT_TRUE(fork.ok());
  ASSERT_TRUE(mine->Detach().ok());
  EXPECT_EQ((*fork)->report()->own_tokens, 7021u);
  EXPECT_GT((*fork)->report()->own_moved, 0u);
  ASSERT_TRUE((*fork)->Detach().ok());
  for (int i = 0; i < 10000 && (client_->Stats()->prefixes > 1 || own_bytes() > 0); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_EQ(client_->Stats()->prefixes, 1u);
  EXPECT_EQ(own_bytes(), 0u);
}

// A policy decides which of the moved tokens stay in memory; steps that have the rest retrieved are
// exact, and read none of those.
TEST_P(OwnTokens, RetainedTokensAreAttendedToInMemory) {
  Put(*client_);
  const StepPolicy policy = {
      .estimator = EstimatorKind::kNone, .k = 1u << 20, .retain = {.tokens = 50, .by = "local"}};
  const auto mine = Attach(*client_, policy, 256),
             theirs = Attach(*reference_, {.mode = StepMode::kFull});
  ASSERT_TRUE(mine && theirs);
  const uint64_t seed = Seed("OwnRetained");
  for (uint32_t r = 0; r < 6 && !HasFailure(); ++r) {
    for (uint32_t layer = 0; layer < 2; ++layer) {
      AppendBoth(*mine, *theirs, layer, 150, seed + 10 * r + layer);
      StepBoth(*mine, *theirs, layer, seed + 10 * r + 2 + layer);
    }
    const auto moved = [&] {
      const SessionReport report = *mine->report();
      return report.own_tokens <= report.own_moved + 256;
    };
    for (int i = 0; i < 30000 && !moved(); ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    ASSERT_TRUE(moved());
  }
  const SessionReport report = *mine->report();
  EXPECT_EQ(report.own_retained, 50u);
  EXPECT_GT(report.total.retained_tokens, 0u);
  EXPECT_EQ(mine->policy().retain, policy.retain);
  StepPolicy without = policy;
  without.retain.tokens = 0;
  ASSERT_TRUE(mine->SetPolicy(without).ok());
  EXPECT_EQ(mine->report()->own_retained, 0u);
  StepBoth(*mine, *theirs, 0, seed + 100);
}

TEST_P(OwnTokens, BoundedSessionsRefuseWhatIsOfThePrefixAlone) {
  Put(*client_);
  const auto mine = Attach(*client_, {.k = 8}, 256), theirs = Attach(*reference_, {.k = 8}, 256);
  ASSERT_TRUE(mine && theirs);
  AppendBoth(*mine, *theirs, 0, 1, 77);
  const Code kState = Code::kFailedPrecondition;
  ExpectRefused(
      {
          {"step", kState,
           [&](auto&, auto& s) {
             Answer out = Room(1);
             return s.Step(0, Queries(1, 3), out.y, out.lse, nullptr);
           }},
          {"select", kState,
           [&](auto&, auto& s) {
             const auto q = Queries(1, 3);
             return StatusOf(s.Select(0, 0, std::span(q).first(2 * kDim), 4));
           }},
          {"summary", kState, [&](auto&, auto& s) { return StatusOf(s.MomentBytes(0, 0)); }},
          {"bound", Code::kInvalidArgument,
           [&](auto& store, auto&) {
             AttachSpec spec;
             spec.model = prompt_.model.name;
             spec.tokens = prompt_.tokens;
             spec.own_memory_tokens = 255;
             return StatusOf(store.Attach(spec));
           }},
      },
      *mine, *theirs);
}

TEST_P(OwnTokens, BatchesOfSessionsAppendToo) {
  Put(*client_);
  const auto one = Attach(*client_), two = Attach(*client_, {.mode = StepMode::kFull});
  const auto reference = Attach(*reference_),
             reference2 = Attach(*reference_, {.mode = StepMode::kFull});
  const uint64_t seed = Seed("OwnBatch");
  const auto run = [&](Store& store, Session& a, Session& b, std::vector<Answer>& out) {
    out.assign(3, Room(1));
    const auto q = Queries(1, seed);
    const auto k = Rows(1, 2, seed + 1), v = Rows(1, 2, seed + 2);
    std::vector<StepRequest> batch = {{&a, 0, q, out[0].y, out[0].lse, nullptr, {}, {}, true, k, v},
                                      {&b, 1, q, out[1].y, out[1].lse, nullptr, {}, {}, true, k, v},
                                      {&a, 1, q, out[2].y, out[2].lse, nullptr, {}}};
    store.StepBatch(batch);
    for (const StepRequest& r : batch) EXPECT_TRUE(r.status.ok()) << r.status.error().message;
  };
  for (int i = 0; i < 3; ++i) {
    std::vector<Answer> mine, theirs;
    run(*client_, *one, *two, mine);
    run(*reference_, *reference, *reference2, theirs);
    for (size_t j = 0; j < 3; ++j) ExpectNear(mine[j].y, theirs[j].y);
  }
  EXPECT_EQ(one->report()->own_tokens, 3u);
}

TEST_P(OwnTokens, RefusalsAreTheSameEverywhere) {
  const auto step = [this](Session& s, uint32_t layer, size_t k_rows, size_t v_rows,
                           HeadRange heads) {
    const auto q = Queries(1, 3);
    const auto k = Rows(1, uint32_t(k_rows), 4), v = Rows(1, uint32_t(v_rows), 5);
    Answer out = Room(1);
    return s.StepAppend(layer, heads, q, k, v, out.y, out.lse, nullptr);
  };
  const auto append = [this](Session& s, uint32_t layer, uint32_t n, size_t rows, bool bad) {
    auto k = Rows(uint32_t(rows), 2, 4), v = Rows(uint32_t(rows), 2, 5);
    const uint16_t nan = 0x7fc0;
    if (bad) std::memcpy(&v[2 * kDim * 2], &nan, 2);
    return s.Append(layer, n, k, v);
  };
  const Code kArgument = Code::kInvalidArgument;
  ExpectRefused({
      {"step: layer", kArgument, [&](auto&, auto& s) { return step(s, 2, 2, 2, {}); }},
      {"step: heads", kArgument,
       [&](auto&, auto& s) {
         return step(s, 0, 2, 2, {1, 2});
       }},
      {"step: k", kArgument, [&](auto&, auto& s) { return step(s, 0, 3, 2, {}); }},
      {"step: no row", kArgument, [&](auto&, auto& s) { return step(s, 0, 0, 0, {}); }},
      {"append: layer", kArgument, [&](auto&, auto& s) { return append(s, 2, 3, 3, false); }},
      {"append: size", kArgument, [&](auto&, auto& s) { return append(s, 0, 2, 3, false); }},
      {"append: NaN", kArgument, [&](auto&, auto& s) { return append(s, 0, 3, 3, true); }},
      {"truncate", kArgument, [&](auto&, auto& s) { return s.Truncate(1); }},
      {"block", kArgument,
       [&](auto&, auto& s) {
         if (Status first = append(s, 0, 3, 3, false); !first.ok()) return first;
         const auto q = Queries(5, 3);
         Answer out = Room(5);
         return s.AttendExact(0, 5, q, out.y, out.lse);
       }},
      {"detached", Code::kFailedPrecondition,
       [&](auto&, auto& s) {
         (void)s.Detach();
         return step(s, 0, 2, 2, {});
       }},
      {"fork of a detached one", Code::kFailedPrecondition,
       [&](auto&, auto& s) { return StatusOf(s.Fork()); }},
  });
}

// A session whose own tokens ended with its daemon must not answer without them.
TEST_P(OwnTokens, AreNotLostSilently) {
  // Over TLS a connection is lost as over TCP; the restart would need the daemon's certificate.
  if (GetParam() == Kind::kEmbedded || GetParam() == Kind::kTls) return;
  Put(*client_);
  const auto mine = Attach(*client_), bare = Attach(*client_), theirs = Attach(*reference_);
  ASSERT_TRUE(mine && bare && theirs);
  StepBoth(*mine, *theirs, 0, 5);
  auto fork = mine->Fork();
  ASSERT_TRUE(fork.ok());
  daemon_->Signal(SIGKILL);
  EXPECT_EQ(daemon_->Wait(), 128 + SIGKILL);
  const std::string listen = daemon_->tcp_address().substr(4);  // the same after a restart
  daemon_ =
      std::make_unique<DaemonProcess>(dir_.path(), std::vector<std::string>{"--listen", listen});
  ASSERT_TRUE(daemon_->ready()) << daemon_->Stderr();
  const auto q = Queries(1, 5);
  Answer out = Room(1);
  ASSERT_TRUE(bare->Step(0, q, out.y, out.lse, nullptr).ok());  // it has none, and attaches again
  const auto k = Rows(1, 2, 6), v = Rows(1, 2, 7);
  for (Session* session : {mine.get(), fork->get()}) {
    for (int i = 0; i < 2; ++i) {
      for (const Status& refused :
           {session->StepAppend(0, q, k, v, out.y, out.lse, nullptr),
            session->Step(0, q, out.y, out.lse, nullptr), session->Append(0, 1, k, v),
            session->AttendExact(0, 1, q, out.y, out.lse), StatusOf(session->Fork()),
            session->Truncate(1)}) {
        ASSERT_FALSE(refused.ok());
        EXPECT_EQ(refused.error().code, Code::kUnavailable);
        // The first call may be the one that notices.
        EXPECT_NE(refused.error().message.find("its own tokens ended"), std::string::npos)
            << refused.error().message;
      }
    }
  }
  ASSERT_TRUE(mine->Truncate(0).ok());
  ASSERT_TRUE(theirs->Truncate(0).ok());
  StepBoth(*mine, *theirs, 0, 8);
  // Also where it is the first call that notices.
  StepBoth(*mine, *theirs, 0, 9);
  daemon_->Signal(SIGKILL);
  EXPECT_EQ(daemon_->Wait(), 128 + SIGKILL);
  daemon_ =
      std::make_unique<DaemonProcess>(dir_.path(), std::vector<std::string>{"--listen", listen});
  ASSERT_TRUE(daemon_->ready()) << daemon_->Stderr();
  const Status truncated = mine->Truncate(0);
  ASSERT_TRUE(truncated.ok()) << truncated.error().ToString();
  ASSERT_TRUE(theirs->Truncate(0).ok());
  StepBoth(*mine, *theirs, 0, 10);
}

// What was not truncated anywhere is lost all the same.
TEST_P(OwnTokens, AFailedTruncationForgetsNoLoss) {
  if (GetParam() == Kind::kEmbedded || GetParam() == Kind::kTls) return;
  Put(*client_);
  ConnectOptions options;
  options.reconnect_ms = 50;
  const std::string listen = daemon_->tcp_address().substr(4);
  auto client = Connect(Remote() ? daemon_->tcp_address() : daemon_->address(), options);
  ASSERT_TRUE(client.ok());
  const auto mine = Attach(**client);
  ASSERT_TRUE(mine);
  const auto k = Rows(1, 2, 6), v = Rows(1, 2, 7);
  ASSERT_TRUE(mine->Append(0, 1, k, v).ok());
  daemon_->Signal(SIGKILL);
  EXPECT_EQ(daemon_->Wait(), 128 + SIGKILL);
  EXPECT_FALSE(mine->Truncate(0).ok());
  EXPECT_FALSE(mine->Truncate(0).ok());
  daemon_ =
      std::make_unique<DaemonProcess>(dir_.path(), std::vector<std::string>{"--listen", listen});
  ASSERT_TRUE(daemon_->ready()) << daemon_->Stderr();
  const Status refused = mine->Append(0, 1, k, v);
  ASSERT_FALSE(refused.ok());
  EXPECT_NE(refused.error().message.find("its own tokens ended"), std::string::npos)
      << refused.error().message;
}

INSTANTIATE_TEST_SUITE_P(Clients, OwnTokens, EveryKind(), KindName);

}  // namespace
}  // namespace prefixd::testing
