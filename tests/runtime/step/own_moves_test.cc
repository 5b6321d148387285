// Tests how own tokens move: under each index, behind a failure, beside steps of other threads, and
// what becomes of them when their session or store goes.
#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <thread>
#include <vector>

#include "tests/runtime/step/own_memory_fixture.h"

namespace prefixd {
namespace {

using testing::kFull;
using testing::kMemory;
using testing::NaiveOwn;
using testing::WatchedStore;

class OwnMovesTest : public testing::OwnMemoryTest {};

// Parts that are too small for the index that the policy names do not keep tokens in memory.
TEST_F(OwnMovesTest, TokensMoveUnderAPolicyThatNamesItsIndex) {
  options_.build_codes = true;
  options_.codes_min_tokens = 1000;
  Prepare("OwnMemoryIndex", 1100);
  auto session = store_->Attach({.model = spec_.name,
                                 .tokens = prompt_.tokens,
                                 .n_tokens = 100,
                                 .policy = {.k = 20, .selector = "codes"},
                                 .own_memory_tokens = kMemory});
  ASSERT_OK(session);
  NaiveOwn rows;
  Session* const all[] = {session->get()};
  for (int round = 0; round < 6; ++round) {
    AppendToAll(all, rows, 200);
    AwaitMoves(**session);
    Decode(**session, rows, /*exact=*/false);
  }
  EXPECT_GT((*session)->report()->own_moved, 600u);
  EXPECT_EQ(store_->Stats()->own_moves_failed, 0u);
}

// A move that failed would rather fail again with more: the next one joins nothing, and those after
// it do.
TEST_F(OwnMovesTest, AfterAFailureAMoveJoinsNothing) {
  struct Moves {
    std::mutex mutex;
    std::set<uint32_t> ids;
    std::vector<size_t> begins;  // [moves] the first own token of each
    size_t refused = 1;          // this one
  };
  const auto moves = std::make_shared<Moves>();
  PrepareWatched("OwnMemoryFailure", [&](WatchedStore& store) {
    store.before_put = [moves](std::span<const uint32_t> tokens,
                               const storage::PutOptions& options) -> Status {
      if (!options.live) return {};
      std::lock_guard lock(moves->mutex);
      size_t begin = 300;
      while (begin < tokens.size() && moves->ids.contains(tokens[begin])) ++begin;
      moves->ids.insert(tokens.begin() + 300, tokens.end());
      moves->begins.push_back(begin - 300);
      if (moves->begins.size() - 1 != moves->refused) return {};
      return Error{Code::kUnavailable, "the disk is away"};
    };
  });
  const auto begins = [&] {
    std::lock_guard lock(moves->mutex);
    return moves->begins;
  };
  auto session = AttachBounded(kFull);
  NaiveOwn rows;
  Session* const all[] = {session.get()};
  AppendToAll(all, rows, 2 * kMemory);
  AwaitMoves(*session);
  const size_t first = session->report()->own_moved;
  AppendToAll(all, rows, 2 * kMemory);
  EXPECT_TRUE(Soon([&] { return store_->Stats()->own_moves_failed == 1; }));
  // It is tried again with a token that comes a second later.
  for (int i = 0; i < 200 && begins().size() < 3; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    AppendToAll(all, rows, 1);
  }
  AwaitMoves(*session);
  AppendToAll(all, rows, 8 * kMemory);
  AwaitMoves(*session);
  EXPECT_EQ(begins(), (std::vector<size_t>{0, 0, first, 0}));
  EXPECT_EQ(store_->Stats()->own_moves_failed, 1u);
  Decode(*session, rows);
  session.reset();
  ExpectNothingLeft();
}

// What was moved for a session that is gone is not made ready to be searched before it is removed:
// others wait for the same thread.
TEST_F(OwnMovesTest, WhatIsDroppedIsNotPreparedFirst) {
  struct Ingest {
    std::atomic<bool> entered{false}, prepared{false}, removed{false}, go_on{false};
  };
  const auto state = std::make_shared<Ingest>();
  PrepareWatched("OwnMemoryDropped", [&](WatchedStore& store) {
    store.before_blob = [state](const storage::SegmentId&) {
      if (state->entered.exchange(true)) return;
      Soon([&] { return state->go_on || state->removed; });
      state->prepared = true;
    };
    store.before_remove = [state](const storage::SegmentId&) {
      if (!state->prepared) state->removed = true;
    };
  });
  auto session = AttachBounded(kFull);
  NaiveOwn rows;
  Session* const all[] = {session.get()};
  AppendToAll(all, rows, 2 * kMemory);
  EXPECT_TRUE(Soon([&] { return state->entered.load(); }));
  ASSERT_OK(session->Detach());
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  EXPECT_FALSE(state->removed);  // which would have been refused, for as long as that takes
  state->go_on = true;
  ExpectNothingLeft();
}

// A step that runs while tokens move, on another thread, answers as if they did not.
TEST_F(OwnMovesTest, StepsOfManyThreadsGoOnWhileTokensMove) {
  Prepare("OwnMemoryThreads");
  auto session = AttachBounded(kFull);
  constexpr uint32_t kTokens = 1500;
  std::vector<std::thread> threads;
  std::vector<NaiveOwn> rows(2);
  std::vector<Token> tokens[2];
  std::vector<std::vector<float>> queries[2];
  std::vector<State> states[2];
  for (uint32_t l = 0; l < 2; ++l) {
    for (uint32_t t = 0; t < kTokens; ++t) {
      tokens[l].push_back(MakeTokens(l, 2, 1));
      queries[l].push_back(MakeQueries(l, 2, 1));
      states[l].push_back(Room(l, 2, 1));
    }
  }
  std::atomic<bool> failed{false};
  for (uint32_t l = 0; l < 2; ++l) {
    threads.emplace_back([&, l] {
      for (uint32_t t = 0; t < kTokens && !failed; ++t) {
        const Status done = session->StepAppend(l, queries[l][t], tokens[l][t].k, tokens[l][t].v,
                                                states[l][t].y, states[l][t].lse, nullptr);
        if (!done.ok()) failed = true;
      }
    });
  }
  // Forks and blocks meanwhile.
  for (int i = 0; i < 20 && !failed; ++i) {
    const auto fork = session->Fork();
    if (!fork.ok()) failed = true;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  for (std::thread& thread : threads) thread.join();
  ASSERT_FALSE(failed);
  for (uint32_t l = 0; l < 2; ++l) {
    for (uint32_t t = 0; t < kTokens && !HasFailure(); ++t) {
      Note(rows[l], l, All(l), 1, tokens[l][t]);
      if (t % 37 == 0 || t + 5 > kTokens) {
        ExpectExact(rows[l], l, All(l), queries[l][t], states[l][t].y, states[l][t].lse);
      }
    }
  }
  AwaitMoves(*session);
  EXPECT_GT(session->report()->own_moved, 0u);
  session.reset();
  ExpectNothingLeft();
}

// A store that closes, or that is closed under sessions, leaves nothing of them.
TEST_F(OwnMovesTest, NothingIsLeftWhenTheStoreIsOpenedAgain) {
  Prepare("OwnMemoryReopen");
  for (const bool outlives : {false, true}) {
    auto session = AttachBounded(kFull);
    NaiveOwn rows;
    Session* const all[] = {session.get()};
    AppendToAll(all, rows, 1500);
    AwaitMoves(*session);
    Decode(*session, rows);
    EXPECT_GT(Stored(), 1u);
    if (!outlives) session.reset();
    store_.reset();
    session.reset();
    Open();
    EXPECT_EQ(Stored(), 1u);
    EXPECT_OK(store_->Verify("", nullptr));
  }
}

}  // namespace
}  // namespace prefixd
