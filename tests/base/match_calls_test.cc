// Tests matches that nobody waits for: who runs beside whom, bounds, and the end of a store.
#include "base/match_calls.h"

#include <algorithm>
#include <atomic>
#include <latch>
#include <mutex>
#include <semaphore>

#include "tests/support/expect_ok.h"

namespace prefixd {
namespace {

using std::chrono::hours;
using std::chrono::milliseconds;

// Holds matches until the test lets them go.
struct Gate {
  std::atomic<int> begun{0};
  std::counting_semaphore<> open{0};
  std::mutex mutex;
  std::vector<uint32_t> tokens;  // the first ones of those that have begun

  MatchCalls::Find Find() {
    return [this](size_t, const MatchSpec& spec) -> Result<PrefixMatch> {
      {
        std::lock_guard lock(mutex);
        tokens.push_back(spec.tokens[0]);
      }
      ++begun;
      open.acquire();
      return PrefixMatch{spec.model, static_cast<uint32_t>(spec.tokens.size()), spec.tokens[0]};
    };
  }
  void Await(int n) const {
    while (begun < n) std::this_thread::yield();
  }
};

Result<std::unique_ptr<PendingMatch>> Begin(MatchCalls& calls, uint32_t token,
                                            milliseconds deadline = hours(1)) {
  return calls.Begin({.model = "m", .tenant = "t", .tokens = {token, 7}}, deadline);
}

TEST(MatchCalls, AnswersAndDeadlines) {
  Gate gate;
  MatchCalls calls(gate.Find());
  const auto match = Begin(calls, 1), hurried = Begin(calls, 2, milliseconds(1));
  ASSERT_OK(match);
  ASSERT_OK(hurried);
  EXPECT_FALSE((*match)->ready());
  EXPECT_CODE((*hurried)->Get(), Code::kDeadlineExceeded);
  EXPECT_TRUE((*hurried)->ready());
  gate.open.release(2);
  const auto found = (*match)->Get();
  ASSERT_OK(found);
  EXPECT_EQ(found->prefix, "m");
  EXPECT_EQ(found->n_tokens, 2u);
  EXPECT_EQ(found->stored_tokens, 1u);
  EXPECT_TRUE((*match)->ready());
}

TEST(MatchCalls, EqualMatchesTakeOneThread) {
  Gate gate;
  MatchCalls calls(gate.Find());
  std::vector<std::unique_ptr<PendingMatch>> same;
  for (int i = 0; i < 10; ++i) {
    auto match = Begin(calls, 1);
    ASSERT_OK(match);
    same.push_back(*std::move(match));
    gate.Await(1);
  }
  std::vector<std::unique_ptr<PendingMatch>> others;
  for (uint32_t token = 2; token <= MatchCalls::kThreads; ++token) {
    auto match = Begin(calls, token);
    ASSERT_OK(match);
    others.push_back(*std::move(match));
  }
  gate.Await(MatchCalls::kThreads);  // the equal ones leave all other threads free
  {
    std::lock_guard lock(gate.mutex);
    EXPECT_EQ(std::ranges::count(gate.tokens, 1u), 1);
  }
  // The first runs; nine share the one that follows it.
  gate.open.release(static_cast<std::ptrdiff_t>(MatchCalls::kThreads) + 1);
  for (const auto& match : same) ASSERT_OK(match->Get());
  for (const auto& match : others) ASSERT_OK(match->Get());
  EXPECT_EQ(gate.begun, static_cast<int>(MatchCalls::kThreads) + 1);
}

TEST(MatchCalls, ABoundOnThoseThatWait) {
  Gate gate;
  MatchCalls calls(gate.Find());
  std::vector<std::unique_ptr<PendingMatch>> all;
  for (uint32_t i = 0; i < MatchCalls::kThreads; ++i) {
    auto match = Begin(calls, i);
    ASSERT_OK(match);
    all.push_back(*std::move(match));
    gate.Await(static_cast<int>(i) + 1);
  }
  for (uint32_t i = 0; i < MatchCalls::kMaxWaiting; ++i) {
    auto match = Begin(calls, 1000 + i, i == 0 ? milliseconds(0) : milliseconds(hours(1)));
    ASSERT_OK(match);
    all.push_back(*std::move(match));
  }
  EXPECT_CODE(Begin(calls, 9999), Code::kResourceExhausted);
  gate.open.release(1000);
  for (size_t i = 0; i < all.size(); ++i) {
    if (i != MatchCalls::kThreads) ASSERT_OK(all[i]->Get());
  }
  // Nobody waited for the one without patience, so it did not run.
  EXPECT_CODE(all[MatchCalls::kThreads]->Get(), Code::kDeadlineExceeded);
  EXPECT_EQ(gate.begun, static_cast<int>(MatchCalls::kThreads + MatchCalls::kMaxWaiting) - 1);
}

TEST(MatchCalls, TheEndOfAStoreAnswersAll) {
  Gate gate;
  std::unique_ptr<PendingMatch> running, waiting;
  {
    MatchCalls calls(gate.Find());
    auto first = Begin(calls, 1);
    ASSERT_OK(first);
    running = *std::move(first);
    gate.Await(1);
    auto second = Begin(calls, 1);
    ASSERT_OK(second);
    waiting = *std::move(second);
    std::thread close([&] { calls.Stop(); });
    EXPECT_CODE(waiting->Get(), Code::kCancelled);
    EXPECT_CODE(Begin(calls, 2), Code::kCancelled);
    gate.open.release(1);
    close.join();
  }
  ASSERT_OK(running->Get());
}

TEST(MatchCalls, WhatAMatchThrowsIsItsError) {
  MatchCalls calls([](size_t, const MatchSpec& spec) -> Result<PrefixMatch> {
    if (spec.tokens[0] == 1) throw std::bad_alloc();
    return PrefixMatch{};
  });
  const auto failed = Begin(calls, 1);
  ASSERT_OK(failed);
  EXPECT_CODE((*failed)->Get(), Code::kResourceExhausted);
  const auto next = Begin(calls, 2);
  ASSERT_OK(next);
  ASSERT_OK((*next)->Get());
}

}  // namespace
}  // namespace prefixd
