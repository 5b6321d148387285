// Tests steps of several sessions at once: the queue joins them, and they are searched together,
// each with the result of a step alone.
#include <atomic>
#include <thread>

#include "base/call_scope.h"
#include "runtime/work/thread_pool.h"
#include "tests/runtime/runtime_fixture.h"

namespace prefixd::testing {
namespace {

class StepBatchTest : public RuntimeTest {
 protected:
  static constexpr uint32_t kTokens = 4500;

  // Attaches sessions on one prompt that differ in everything that may differ.
  void AttachSome(const SyntheticPrompt& prompt) {
    std::vector<StepPolicy> policies(6);
    for (size_t i = 0; i < policies.size(); ++i) {
      policies[i].k = 10 + 17 * static_cast<uint32_t>(i);
      policies[i].selector = "codes";
    }
    policies[2].estimator = EstimatorKind::kNone;
    policies[3].mode = StepMode::kFull;
    policies[4].selector = "exact";
    policies[5].estimator = EstimatorKind::kScan;
    for (const StepPolicy& policy : policies) {
      sessions_.push_back(Attach(prompt, policy));
      ASSERT_TRUE(sessions_.back());
    }
    // This session is on the same prefix, too, and searches exact keys like the fifth.
    policies[4].k = 200;
    sessions_.push_back(Attach(prompt, policies[4]));
    ASSERT_TRUE(sessions_.back());
  }

  std::vector<std::shared_ptr<Session>> sessions_;
};

TEST_F(StepBatchTest, SessionsOnOnePrefixGetWhatTheyGetAlone) {
  const uint64_t seed = Seed("SessionsOnOnePrefixGetWhatTheyGetAlone");
  options_.build_codes = true;
  // Keys are in memory first, and then read for every search.
  for (const uint64_t memory : {64ull << 20, 0ull}) {
    options_.selector_memory_bytes = memory;
    for (const uint32_t threads : {1u, 2u, 7u}) {
      options_.threads = threads;
      sessions_.clear();
      Open();
      const auto prompt = MakePrompt(spec_.geometry, kTokens, seed);
      ASSERT_NE(PutReady(prompt), "");
      AttachSome(prompt);
      const size_t n = sessions_.size();
      const auto q = [&](size_t i) { return prompt.Q(1, kTokens - 1 - i, 1); };
      std::vector<Output> alone;
      for (size_t i = 0; i < n; ++i) alone.push_back(Step(*sessions_[i], 1, q(i)));
      std::vector<Output> together(n);
      std::vector<StepRequest> requests;
      for (size_t i = 0; i < n; ++i) {
        together[i].y.resize(64), together[i].lse.resize(4);
        requests.push_back(
            {sessions_[i].get(), 1, q(i), together[i].y, together[i].lse, &together[i].info, {}});
      }
      store_->StepBatch(requests);
      uint64_t bytes = 0, bytes_alone = 0;
      for (size_t i = 0; i < n; ++i) {
        SCOPED_TRACE(i);
        ASSERT_OK(requests[i].status);
        EXPECT_EQ(together[i].y, alone[i].y);
        EXPECT_EQ(together[i].lse, alone[i].lse);
        EXPECT_EQ(together[i].info.rho_z.size(), alone[i].info.rho_z.size());
        EXPECT_EQ(together[i].info.k_per_head, alone[i].info.k_per_head);
        EXPECT_EQ(together[i].info.ledger.retrieved_tokens, alone[i].info.ledger.retrieved_tokens);
        EXPECT_EQ(together[i].info.ledger.keys_scanned, alone[i].info.ledger.keys_scanned);
        EXPECT_LE(together[i].info.ledger.scan_bytes, alone[i].info.ledger.scan_bytes);
        bytes += together[i].info.ledger.scan_bytes;
        bytes_alone += alone[i].info.ledger.scan_bytes;
      }
      // With more threads than heads, sessions are spread over them instead.
      if (threads <= 2) {
        EXPECT_LT(bytes, bytes_alone);
      }
    }
  }
}

TEST_F(StepBatchTest, ALargeBatchOfOneHeadGetsWhatItGetsAlone) {
  const uint64_t seed = Seed("ALargeBatchOfOneHeadGetsWhatItGetsAlone");
  options_.build_codes = true;
  Open();
  const auto prompt = MakePrompt(spec_.geometry, kTokens, seed);
  ASSERT_NE(PutReady(prompt), "");
  StepPolicy policy;
  policy.k = 20;
  const auto session = Attach(prompt, policy);
  ASSERT_TRUE(session);
  constexpr size_t kSteps = 150;
  std::vector<std::span<const float>> queries(kSteps);
  std::vector<std::vector<float>> y(kSteps), lse(kSteps);
  std::vector<StepRequest> requests;
  for (size_t i = 0; i < kSteps; ++i) {
    queries[i] = prompt.Q(1, kTokens - 1 - i, 1);
    y[i].resize(64), lse[i].resize(4);
    requests.push_back({session.get(), 1, queries[i], y[i], lse[i], nullptr, {}});
  }
  store_->StepBatch(requests);
  for (size_t i = 0; i < kSteps; ++i) {
    SCOPED_TRACE(i);
    ASSERT_OK(requests[i].status);
    const Output alone = Step(*session, 1, queries[i]);
    EXPECT_EQ(y[i], alone.y);
    EXPECT_EQ(lse[i], alone.lse);
  }
}

TEST_F(StepBatchTest, ThreadsThatStepAtOnceGetWhatTheyGetAlone) {
  const uint64_t seed = Seed("ThreadsThatStepAtOnceGetWhatTheyGetAlone");
  options_.build_codes = true;
  Open();
  const auto prompt = MakePrompt(spec_.geometry, kTokens, seed);
  ASSERT_NE(PutReady(prompt), "");
  AttachSome(prompt);
  std::vector<Output> want;
  for (size_t i = 0; i < sessions_.size(); ++i) {
    want.push_back(Step(*sessions_[i], 0, prompt.Q(0, kTokens - 1 - i, 1)));
  }
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (size_t i = 0; i < sessions_.size(); ++i) {
    threads.emplace_back([&, i] {
      const auto q = prompt.Q(0, kTokens - 1 - i, 1);
      for (int round = 0; round < 30; ++round) {
        std::vector<float> y(64), lse(4);
        const Status status = sessions_[i]->Step(0, q, y, lse, nullptr);
        wrong += !status.ok() || y != want[i].y || lse != want[i].lse;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(store_->Stats().value().steps, sessions_.size() * 31);
}

TEST(ThreadPool, PiecesOfACallEndWithIt) {
  ThreadPool pool(3);
  CallCanceller canceller;
  std::atomic<size_t> begun{0}, ended{0};
  {
    const CallScope scope(CallLimits::Of(0, &canceller));
    const Status status = pool.ParallelFor(100, [&](size_t) -> Status {
      ++begun;
      if (begun == 3) canceller.Cancel();  // the pieces run on several threads
      const auto until = CallLimits::Clock::now() + std::chrono::seconds(20);
      while (CheckCall().ok()) {
        std::this_thread::yield();
        if (CallLimits::Clock::now() > until) return Error{Code::kInternal, "it goes on"};
      }
      ++ended;
      return {};
    });
    EXPECT_CODE(status, Code::kCancelled);
    EXPECT_CODE(pool.ParallelFor(1, [&](size_t) -> Status { return {}; }), Code::kCancelled);
  }
  EXPECT_EQ(begun, ended);
  EXPECT_LT(begun, 100u);
  // Work that belongs to no call goes on.
  std::atomic<size_t> done{0};
  ASSERT_OK(pool.ParallelFor(100, [&](size_t) -> Status {
    ++done;
    return CheckCall();
  }));
  EXPECT_EQ(done, 100u);
}

}  // namespace
}  // namespace prefixd::testing
