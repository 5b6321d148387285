// Calls end by their deadline and by a cancellation, and leave nothing behind: embedded, and
// through a daemon over each kind of socket.
#include <time.h>

#include <atomic>
#include <random>
#include <thread>

#include "base/call_scope.h"
#include "tests/daemon/calls/calls_fixture.h"

namespace prefixd::testing {
namespace {

// What all threads of this process have computed.
double CpuSeconds() {
  timespec t{};
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
}

TEST_P(CallsTest, ACancelledCallEndsAndMayBeRepeated) {
  OpenWay(MakePrompt(spec_.geometry, 400, Seed("CallsTest.Cancel")));
  const auto session = store().Attach(Spec(full_));
  ASSERT_OK(session);
  for (const Call& call : Calls()) {
    const Answer want = call.run(**session);
    const uint64_t steps = (*session)->report()->total.steps, memory = CallMemory(store());
    HoldDisk();
    auto held = std::async(std::launch::async, [&] { return call.run(**session); });
    plan_->AwaitInjected();
    EXPECT_TRUE(EndsWhileHeld([&] {
      (*session)->Cancel();
      EXPECT_CODE(held.get(), Code::kCancelled);
    })) << call.name;
    Release();
    EXPECT_EQ((*session)->report()->total.steps, steps) << call.name;
    ExpectSame(call.run(**session), want, call.name);
    EXPECT_EQ(CallMemory(store()), memory) << call.name;
    EXPECT_EQ(store().Stats()->host_tier_pinned, 0u);
  }
}

TEST_P(CallsTest, ALateCallEndsAndMayBeRepeated) {
  OpenWay(MakePrompt(spec_.geometry, 400, Seed("CallsTest.Deadline")));
  const auto session = AttachBounded(full_, 200);
  for (const Call& call : Calls()) {
    const Answer want = Patiently(call, *session);
    HoldDisk();
    EXPECT_TRUE(EndsWhileHeld([&] { EXPECT_CODE(call.run(*session), Code::kDeadlineExceeded); }))
        << call.name;
    Release();
    ExpectSame(Patiently(call, *session), want, call.name);
  }
  EXPECT_EQ(store().Stats()->sessions, 1u);  // the connection did not break: it is the same session
  EXPECT_EQ(store().Stats()->sessions_total, 1u);
}

TEST_P(CallsTest, ALateAttachLeavesNothingAndHurtsNobody) {
  OpenWay(MakePrompt(spec_.geometry, 400, Seed("CallsTest.Attach")));
  const auto other = client_ ? Another() : nullptr;
  const uint64_t memory = CallMemory(store());
  HoldDisk();
  auto late = std::async(std::launch::async, [&] { return store().Attach(Spec(full_, 2000)); });
  plan_->AwaitInjected();
  // It wants the same prefix, and goes on when the call that opens it does not.
  auto patient = std::async(std::launch::async,
                            [&] { return (other ? *other : store()).Attach(Spec(full_)); });
  EXPECT_TRUE(EndsWhileHeld([&] { EXPECT_CODE(late.get(), Code::kDeadlineExceeded); }));
  Release();
  {
    const auto session = patient.get();
    ASSERT_OK(session);
    ASSERT_OK(Calls()[0].run(**session));
    EXPECT_EQ(store().Stats()->sessions, 1u);
    ASSERT_OK((*session)->Detach());
  }
  EXPECT_EQ(store().Stats()->sessions, 0u);
  EXPECT_EQ(CallMemory(store()), memory);
}

TEST_P(CallsTest, OneSessionsCancellationIsNotAnothers) {
  OpenWay(MakePrompt(spec_.geometry, 400, Seed("CallsTest.Others")));
  const auto one = store().Attach(Spec(full_)), two = store().Attach(Spec(full_));
  ASSERT_OK(one);
  ASSERT_OK(two);
  const auto q = prompt_.Q(1, 399, 1);
  const Output want = Step(**two, 1, q);
  std::vector<float> y(want.y.size()), lse(want.lse.size()), other_y(y), other_lse(lse);
  HoldDisk();
  auto held = std::async(std::launch::async, [&] {
    std::vector<StepRequest> batch = {{one->get(), 1, q, other_y, other_lse, nullptr, {}},
                                      {two->get(), 1, q, y, lse, nullptr, {}}};
    store().StepBatch(batch);
    return std::pair(batch[0].status, batch[1].status);
  });
  plan_->AwaitInjected();
  (*one)->Cancel();
  // The other's step, which may have to begin anew, waits for the disk again.
  EXPECT_EQ(held.wait_for(std::chrono::seconds(1)), std::future_status::timeout);
  Release();
  const auto [cancelled, done] = held.get();
  EXPECT_CODE(cancelled, Code::kCancelled);
  ASSERT_OK(done);
  EXPECT_EQ(y, want.y);
  EXPECT_EQ(lse, want.lse);
}

TEST_P(CallsTest, ALongExactPassEndsBetweenItsQueries) {
  options_.host_tier_bytes = 8 << 20;
  const auto prompt = MakePrompt(spec_.geometry, 3000, Seed("CallsTest.Exact"));
  OpenWay(prompt);
  const auto session = store().Attach(Spec(full_));
  ASSERT_OK(session);
  // More than a second's work: it reads the rows once, and no step of it takes long.
  constexpr uint32_t kQueries = 40000, kParts = 8;
  const KvGeometry& g = spec_.geometry;
  std::vector<float> q(size_t{kQueries} * g.n_q_heads * g.key_dim, 0.25f), y(q.size()),
      lse(size_t{kQueries} * g.n_q_heads);
  const auto attend = [&](uint32_t n) {
    return (*session)->AttendExact(1, n, std::span(q).first(size_t{n} * g.n_q_heads * g.key_dim),
                                   std::span(y).first(size_t{n} * g.n_q_heads * g.value_dim),
                                   std::span(lse).first(size_t{n} * g.n_q_heads));
  };
  double begin = CpuSeconds();
  ASSERT_OK(attend(kQueries / kParts));
  const double of_a_part = CpuSeconds() - begin;
  // Other load of the machine does not count in what this process computes.
  begin = CpuSeconds();
  auto ended = std::async(std::launch::async, [&] { return attend(kQueries); });
  while (CpuSeconds() < begin + of_a_part &&
         ended.wait_for(std::chrono::milliseconds(1)) == std::future_status::timeout) {
  }
  (*session)->Cancel();
  EXPECT_CODE(ended.get(), Code::kCancelled);
  EXPECT_LT(CpuSeconds() - begin, of_a_part * kParts / 2);
  ExpectSuffix(**session, prompt, 1, 2990, 8);
}

TEST_P(CallsTest, ALatePutWriteMayBeRepeated) {
  spec_.geometry = SmallGeometry(1, 2, 2, 128);
  OpenWay(MakePrompt(spec_.geometry, 64, Seed("CallsTest.Put")), 1u << 20);
  // 12 MiB, more than the writer's buffers.
  constexpr uint32_t kTokens = 12288;
  const size_t token = spec_.geometry.n_kv_heads * spec_.geometry.row(0).key_bytes();
  std::vector<std::byte> k(kTokens * token), v(kTokens * token);
  std::mt19937_64 rng(Seed("CallsTest.PutRows"));
  for (auto* rows : {&k, &v}) {  // finite numbers
    for (size_t i = 0; i < rows->size(); i += 2) {
      (*rows)[i] = std::byte(rng());
      (*rows)[i + 1] = std::byte{0x3e};
    }
  }
  PutSpec spec;
  spec.model = spec_.name;
  for (uint32_t t = 0; t < kTokens; ++t) spec.tokens.push_back(70000 + t);
  auto put = store().BeginPut(spec);
  ASSERT_OK(put);
  const auto write = [&] { return (*put)->Write(0, 0, kTokens, k, v); };
  HoldDisk(/*reads=*/false);
  EXPECT_TRUE(EndsWhileHeld([&] {
    const CallScope scope(CallLimits::Of(300, nullptr));
    EXPECT_CODE(write(), Code::kDeadlineExceeded);
  }));
  EXPECT_LT((*put)->progress().done, kTokens);
  Release();
  ASSERT_OK(write());
  EXPECT_CODE(write(), Code::kInvalidArgument);  // it is not interrupted any more
  {
    CallLimits late;
    late.deadline = CallLimits::Clock::now();
    const CallScope scope(late);
    EXPECT_CODE((*put)->Commit(), Code::kDeadlineExceeded);  // and goes on
  }
  const auto stored = (*put)->Commit();
  ASSERT_OK(stored);
  prefix_ = stored->prefix;
  const auto session = store().Attach(Spec(full_));
  ASSERT_OK(session);
  std::vector<std::byte> read_k(k.size()), read_v(v.size());
  ASSERT_OK((*session)->ReadLayer({.layer = 0, .tokens = {0, kTokens}}, read_k, read_v));
  EXPECT_TRUE(read_k == k && read_v == v);
}

TEST_P(CallsTest, RandomCancellationsChangeNoAnswer) {
  const uint64_t seed = Seed("CallsTest.Random");
  OpenWay(MakePrompt(spec_.geometry, 400, seed));
  const uint64_t memory = CallMemory(store());
  StepPolicy few;
  few.k = 25;
  few.selector = "exact";
  std::vector<std::shared_ptr<Session>> sessions;
  for (const StepPolicy& policy : {full_, few, few}) {
    auto session = store().Attach(Spec(policy));
    ASSERT_OK(session);
    sessions.push_back(*session);
  }
  std::vector<Call> calls = Calls();
  // The threads share sessions, and own tokens are for one call after the other.
  std::erase_if(calls,
                [](const Call& call) { return std::string(call.name) == "step and append"; });
  std::vector<std::vector<Answer>> want(sessions.size());
  for (size_t s = 0; s < sessions.size(); ++s) {
    for (const Call& call : calls) want[s].push_back(call.run(*sessions[s]));
  }
  // The disk holds each read for a while.
  HoldDisk();
  std::atomic<bool> stop{false};
  std::thread disk([&] {
    while (!stop) {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
      engine_->Release();
    }
  });
  std::thread canceller([&] {
    std::mt19937_64 rng(seed);
    while (!stop) {
      std::this_thread::sleep_for(std::chrono::microseconds(rng() % 8000));
      sessions[rng() % sessions.size()]->Cancel();
    }
  });
  std::atomic<int> answered{0}, cancelled{0};
  std::vector<std::thread> threads;
  for (uint64_t t = 0; t < 3; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937_64 rng(seed + t);
      for (int i = 0; i < 60 || (i < 5000 && (answered == 0 || cancelled == 0)); ++i) {
        const size_t s = rng() % sessions.size(), c = rng() % calls.size();
        const Answer answer = calls[c].run(*sessions[s]);
        if (answer.ok()) {
          ExpectSame(answer, want[s][c], calls[c].name);
          ++answered;
        } else {
          EXPECT_CODE(answer, Code::kCancelled);
          ++cancelled;
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  stop = true;
  disk.join();
  canceller.join();
  Release();
  EXPECT_GT(answered, 0);
  EXPECT_GT(cancelled, 0);
  for (size_t s = 0; s < sessions.size(); ++s) {
    for (size_t c = 0; c < calls.size(); ++c) {
      ExpectSame(calls[c].run(*sessions[s]), want[s][c], calls[c].name);
    }
    ASSERT_OK(sessions[s]->Detach());
  }
  sessions.clear();
  EXPECT_EQ(CallMemory(store()), memory);
  EXPECT_EQ(store().Stats()->sessions, 0u);
  EXPECT_EQ(store().Stats()->host_tier_pinned, 0u);
}

std::string WayName(const ::testing::TestParamInfo<Way>& way) {
  constexpr const char* kNames[] = {"Embedded", "Unix", "Tcp"};
  return kNames[size_t(way.param)];
}
INSTANTIATE_TEST_SUITE_P(Ways, CallsTest, ::testing::Values(Way::kEmbedded, Way::kUnix, Way::kTcp),
                         WayName);

}  // namespace
}  // namespace prefixd::testing
