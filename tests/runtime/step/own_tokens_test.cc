// Tests own tokens of sessions against plain lists of rows and attention in float64: appending,
// steps, causal blocks, truncation, forks, memory, and threads.
#include <atomic>
#include <thread>
#include <vector>

#include "prefixd/merge.h"
#include "runtime/step/own_tokens.h"
#include "tests/runtime/step/own_tokens_fixture.h"

namespace prefixd {
namespace {

using testing::kFull;
using testing::NaiveOwn;
using testing::OwnTokensTest;
using testing::Seed;

TEST_F(OwnTokensTest, StepsOverAllTokensAreAttentionOverPrefixAndOwn) {
  for (const DType dtype : {DType::kBf16, DType::kF16, DType::kF32}) {
    spec_.geometry = testing::SmallGeometry(2, 4, 2, 16, dtype);
    spec_.geometry.layers[1].softcap = 20;
    spec_.name = std::string("tiny-") + std::string(DTypeName(dtype));
    Prepare("OwnExact");
    const auto session = Attach(prompt_, kFull);
    NaiveOwn own;
    for (uint32_t t = 0; t < 140; ++t) {  // into the third chunk
      for (uint32_t layer = 0; layer < 2; ++layer) {
        const Token token = MakeTokens(layer, 2, 1);
        const auto q = MakeQueries(layer, 2, 1);
        State out = Room(layer, 2, 1);
        ASSERT_OK(session->StepAppend(layer, q, token.k, token.v, out.y, out.lse, nullptr));
        Note(own, layer, All(layer), 1, token);
        if (t % 7 == 0 || t > 125) ExpectExact(own, layer, All(layer), q, out.y, out.lse);
      }
    }
    EXPECT_EQ(session->report()->own_tokens, 140u);
    // A plain step attends to the prefix alone.
    const auto q = MakeQueries(0, 2, 1);
    const Output plain = Step(*session, 0, q);
    ExpectExact({}, 0, All(0), q, plain.y, plain.lse);
  }
}

TEST_F(OwnTokensTest, StepsUnderABudgetAreTheStepMergedWithOwn) {
  Prepare("OwnBudget");
  for (const StepPolicy& policy : {StepPolicy{.estimator = EstimatorKind::kMoment, .k = 16},
                                   StepPolicy{.estimator = EstimatorKind::kNone, .k = 16},
                                   StepPolicy{.mode = StepMode::kAnchors}}) {
    const auto session = Attach(prompt_, policy), plain = Attach(prompt_, policy);
    NaiveOwn own;
    const Token block = MakeTokens(1, 2, 100);
    ASSERT_OK(session->Append(1, 100, block.k, block.v));
    Note(own, 1, All(1), 100, block);
    for (int t = 0; t < 10; ++t) {
      const Token token = MakeTokens(1, 2, 1);
      const auto q = MakeQueries(1, 2, 1);
      State out = Room(1, 2, 1);
      StepInfo info;
      ASSERT_OK(session->StepAppend(1, q, token.k, token.v, out.y, out.lse, &info));
      Note(own, 1, All(1), 1, token);
      Output want = Step(*plain, 1, q);
      EXPECT_EQ(info.ledger.retrieved_tokens, want.info.ledger.retrieved_tokens);
      const LayerShape g = spec_.geometry.layer(1);
      for (uint32_t h = 0; h < 4; ++h) {
        const auto& rows = own.rows[{1, h / 2}];
        const auto exact = reference::ExactAttention(
            std::span(q).subspan(h * 16, 16), 1, spec_.geometry.layers[1],
            {rows.data(), rows.size() / g.row().bytes(), g.row().bytes(), g.row()});
        const std::vector<float> y(exact.y.begin(), exact.y.end());
        MergeStates(std::span(want.y).subspan(h * 16, 16), &want.lse[h], y,
                    static_cast<float>(exact.lse[0]));
        EXPECT_NEAR(out.lse[h], want.lse[h], 1e-5 * (1 + std::abs(want.lse[h])));
        for (size_t i = 0; i < 16; ++i) EXPECT_NEAR(out.y[h * 16 + i], want.y[h * 16 + i], 1e-5);
      }
    }
  }
}

TEST_F(OwnTokensTest, ABlockSeesItsOwnTokensCausally) {
  Prepare("OwnBlock");
  const auto session = Attach(prompt_, {.estimator = EstimatorKind::kMoment, .k = 16});
  NaiveOwn own;
  for (const uint32_t n : {5u, 90u, 3u}) {
    const Token block = MakeTokens(0, 2, n);
    ASSERT_OK(session->Append(0, n, block.k, block.v));
    Note(own, 0, All(0), n, block);
    const auto q = MakeQueries(0, 2, n);
    State out = Room(0, 2, n);
    ASSERT_OK(session->AttendExact(0, n, q, out.y, out.lse));
    for (uint32_t i = 0; i < n; ++i) {
      ExpectExact(own, 0, All(0), std::span(q).subspan(i * 64, 64),
                  std::span(out.y).subspan(i * 64, 64), std::span(out.lse).subspan(i * 4, 4),
                  n - 1 - i);
    }
    // The first half alone, with the rest behind it.
    const uint32_t half = n / 2;
    State part = Room(0, 2, half);
    ASSERT_OK(session->AttendExact(0, {}, half, n - half, std::span(q).first(half * 64), part.y,
                                   part.lse));
    for (size_t i = 0; i < part.y.size(); ++i) EXPECT_NEAR(part.y[i], out.y[i], 1e-6);
  }
  State out = Room(0, 2, 99);
  const auto q = MakeQueries(0, 2, 99);
  EXPECT_CODE(session->AttendExact(0, 99, q, out.y, out.lse), Code::kInvalidArgument);
  ASSERT_OK(session->AttendExact(1, 99, q, out.y, out.lse));  // this layer has none
}

// Random calls on some sessions and their forks, each compared with its list of rows.
TEST_F(OwnTokensTest, RandomCallsKeepWhatListsOfRowsKeep) {
  Prepare("OwnRandom", 60);
  struct Of {
    std::shared_ptr<Session> session;
    NaiveOwn own;
  };
  std::vector<Of> all;
  all.push_back({Attach(prompt_, kFull), {}});
  const auto upto = [&](uint32_t n) { return random_->Int(0, n - 1); };
  for (int i = 0; i < 700; ++i) {
    Of& one = all[upto(uint32_t(all.size()))];
    const uint32_t layer = upto(2);
    const uint32_t what = upto(20);
    if (what < 11) {
      const HeadRange heads = what < 8 ? HeadRange{0, 2} : HeadRange{upto(2), 1};
      const Token token = MakeTokens(layer, heads.n, 1);
      const auto q = MakeQueries(layer, heads.n, 1);
      State out = Room(layer, heads.n, 1);
      ASSERT_OK(
          one.session->StepAppend(layer, heads, q, token.k, token.v, out.y, out.lse, nullptr));
      Note(one.own, layer, heads, 1, token);
      ExpectExact(one.own, layer, heads, q, out.y, out.lse);
    } else if (what < 14) {
      const uint32_t n = 1 + upto(150);
      const Token block = MakeTokens(layer, 2, n);
      ASSERT_OK(one.session->Append(layer, n, block.k, block.v));
      Note(one.own, layer, All(layer), n, block);
    } else if (what < 17) {
      const uint32_t most = one.session->report()->own_tokens;
      const uint32_t n = upto(3) == 0 ? upto(most + 1) : most - std::min(most, upto(6));
      ASSERT_OK(one.session->Truncate(n));
      for (auto& [head, rows] : one.own.rows) {
        rows.resize(std::min(rows.size(), n * spec_.geometry.row(head.first).bytes()));
      }
      EXPECT_CODE(one.session->Truncate(n + 1000), Code::kInvalidArgument);
    } else if (what < 19 && all.size() < 6) {
      auto fork = one.session->Fork();
      ASSERT_OK(fork);
      Of copy{*std::move(fork), one.own};
      all.push_back(std::move(copy));
      continue;
    } else if (all.size() > 1) {
      one = std::move(all.back());
      all.pop_back();
      continue;
    }
    uint32_t most = 0;
    for (uint32_t l = 0; l < 2; ++l) {
      for (uint32_t h = 0; h < 2; ++h) most = std::max(most, Count(one.own, l, h));
    }
    ASSERT_EQ(one.session->report()->own_tokens, most);
  }
  EXPECT_GT(Used(), 0u);
  all.clear();
  EXPECT_EQ(Used(), 0u);
}

TEST_F(OwnTokensTest, ARefusedCallChangesNothing) {
  Prepare("OwnRefused");
  const auto session = Attach(prompt_, kFull);
  Token token = MakeTokens(0, 2, 1);
  auto q = MakeQueries(0, 2, 1);
  State out = Room(0, 2, 1);
  const auto step = [&] {
    return session->StepAppend(0, q, token.k, token.v, out.y, out.lse, nullptr);
  };
  ASSERT_OK(step());
  Token bad = MakeTokens(0, 2, 3);
  const uint16_t infinite = 0x7f80;
  std::memcpy(&bad.v[size_t{2} * 2 * 16 * 2], &infinite, 2);  // of the third token
  const Status refused = session->Append(0, 3, bad.k, bad.v);
  EXPECT_CODE(refused, Code::kInvalidArgument);
  EXPECT_NE(refused.error().message.find("value of layer 0, own token 2"), std::string::npos)
      << refused.error().message;
  EXPECT_CODE(session->Append(0, 2, bad.k, bad.v), Code::kInvalidArgument);
  EXPECT_CODE(session->Append(2, 3, bad.k, bad.v), Code::kInvalidArgument);
  EXPECT_CODE(session->Append(0, {1, 2}, 3, bad.k, bad.v), Code::kInvalidArgument);
  q[3] = std::nanf("");
  EXPECT_CODE(step(), Code::kInvalidArgument);
  q[3] = 0;
  token.k.pop_back();
  EXPECT_CODE(step(), Code::kInvalidArgument);
  EXPECT_CODE(session->Truncate(2), Code::kInvalidArgument);
  EXPECT_EQ(session->report()->own_tokens, 1u);
  // Two steps of one batch that append to one head.
  token = MakeTokens(0, 2, 1);
  State other = Room(0, 2, 1);
  std::vector<StepRequest> batch = {
      {session.get(), 0, q, out.y, out.lse, nullptr, {}, {}, true, token.k, token.v},
      {session.get(), 0, q, other.y, other.lse, nullptr, {}, {}, true, token.k, token.v}};
  store_->StepBatch(batch);
  EXPECT_OK(batch[0].status);
  EXPECT_CODE(batch[1].status, Code::kFailedPrecondition);
  EXPECT_EQ(session->report()->own_tokens, 2u);
  ASSERT_OK(session->Detach());
  EXPECT_EQ(Used(), 0u);
  EXPECT_CODE(step(), Code::kFailedPrecondition);
  EXPECT_CODE(session->Append(0, 0, {}, {}), Code::kFailedPrecondition);
  EXPECT_CODE(session->Truncate(0), Code::kFailedPrecondition);
  EXPECT_CODE(session->Fork(), Code::kFailedPrecondition);
}

// Draft tokens are refused while the tokens before them are stored.
TEST_F(OwnTokensTest, WhatIsTruncatedWhileItIsStoredIsNotNoted) {
  Prepare("OwnStored");
  OwnTokens own(spec_.geometry, {});
  const auto append = [&](uint32_t n) {
    for (uint32_t layer = 0; layer < 2; ++layer) {
      const Token block = MakeTokens(layer, 2, n);
      auto growth = own.Grow(layer, All(layer), n, block.k, block.v);
      ASSERT_OK(growth);
      growth->Commit();
    }
  };
  append(30);
  const OwnTokens::Snapshot first = own.Take();
  append(5);
  ASSERT_OK(own.Truncate(32));
  own.NoteStored(first, {"first", 25, "lineage"});
  EXPECT_EQ(own.Take().stored.prefix, "first");
  EXPECT_EQ(own.Take().stored.tokens, 25u);
  EXPECT_EQ(own.Take().stored.lineage, "lineage");
  // Each snapshot has its own truncations, and what comes again is not what was stored.
  const OwnTokens::Snapshot early = own.Take();
  ASSERT_OK(own.Truncate(12));
  append(18);
  const OwnTokens::Snapshot late = own.Take();
  ASSERT_OK(own.Truncate(28));
  own.NoteStored(early, {"early", 31, ""});
  EXPECT_EQ(own.Take().stored.prefix, "early");
  EXPECT_EQ(own.Take().stored.tokens, 12u);
  own.NoteStored(late, {"late", 30, ""});
  EXPECT_EQ(own.Take().stored.tokens, 28u);
  EXPECT_EQ(own.Take().stored.lineage, "lineage");
  ASSERT_OK(own.Truncate(3));
  EXPECT_EQ(own.Take().stored.tokens, 3u);
}

TEST_F(OwnTokensTest, MemoryBoundsThemAndComesBack) {
  spec_.geometry = testing::SmallGeometry(2, 8, 8, 64);
  options_.memory_bytes = 128 << 20;
  Prepare("OwnMemory", 100);
  const auto session = Attach(prompt_, kFull);
  const Token block = MakeTokens(0, 8, 1024);  // 2 MiB
  uint32_t appended = 0;
  Status last;
  while (appended < 200 && (last = session->Append(0, 1024, block.k, block.v)).ok()) ++appended;
  EXPECT_CODE(last, Code::kResourceExhausted);
  EXPECT_GT(appended, 2u);
  EXPECT_EQ(session->report()->own_tokens, appended * 1024);
  const uint64_t full = Used();
  EXPECT_GE(full, uint64_t{appended} * (2 << 20));
  EXPECT_LT(full, uint64_t{appended + 1} * (2 << 20));
  // A fork costs nothing until it goes on; a truncation gives back.
  {
    const auto fork = session->Fork();
    ASSERT_OK(fork);
    EXPECT_EQ(Used(), full);
    ASSERT_OK(session->Truncate(0));
    EXPECT_EQ(Used(), full);
  }
  EXPECT_EQ(Used(), 0u);
  ASSERT_OK(session->Append(0, 1024, block.k, block.v));
}

// Layers of one session, and forks, each by a thread of their own.
TEST_F(OwnTokensTest, ThreadsAppendToLayersAndForks) {
  Prepare("OwnThreads", 60);
  const auto session = Attach(prompt_, kFull);
  const Token first = MakeTokens(0, 2, 70);
  for (uint32_t layer = 0; layer < 2; ++layer)
    ASSERT_OK(session->Append(layer, 70, first.k, first.v));
  std::vector<std::shared_ptr<Session>> sessions = {session};
  for (int i = 0; i < 2; ++i) sessions.push_back(*session->Fork());
  const auto q = MakeQueries(0, 2, 1);
  std::vector<Token> tokens;
  for (int i = 0; i < 6; ++i) tokens.push_back(MakeTokens(0, 2, 1));
  std::atomic<int> failed{0};
  std::vector<std::thread> threads;
  for (uint32_t i = 0; i < 6; ++i) {
    threads.emplace_back([&, i] {
      Session& s = *sessions[i / 2];
      State out = Room(0, 2, 1);
      for (int t = 0; t < 40; ++t) {
        failed += !s.StepAppend(i % 2, q, tokens[i].k, tokens[i].v, out.y, out.lse, nullptr).ok();
        if (t % 8 == 3) failed += !s.Fork().ok();
        if (t % 8 == 5) failed += !s.AttendExact(i % 2, 1, q, out.y, out.lse).ok();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(failed, 0);
  for (uint32_t i = 0; i < 6; ++i) {
    NaiveOwn own;
    Note(own, i % 2, All(0), 70, first);
    for (int t = 0; t < 40; ++t) Note(own, i % 2, All(0), 1, tokens[i]);
    State out = Room(0, 2, 1);
    ASSERT_OK(sessions[i / 2]->AttendExact(i % 2, 1, q, out.y, out.lse));
    ExpectExact(own, i % 2, All(0), q, out.y, out.lse);
  }
}

}  // namespace
}  // namespace prefixd
