// Tests exact passes that stop for other tenants: whatever they are cut into, they return the bits
// of a pass that nothing stopped.
#include <atomic>
#include <thread>
#include <vector>

#include "runtime/session/session_impl.h"
#include "runtime/step/step.h"
#include "tests/runtime/runtime_fixture.h"

namespace prefixd::testing {
namespace {

class ExactPassTest : public RuntimeTest {
 protected:
  // A turn that ends when it is asked for the n-th time; 0: never.
  class Turn final : public StepTurn {
   public:
    explicit Turn(uint32_t n) : n_(n) {}
    bool GoesOn() override { return ++asked_ != n_; }
    bool shared() const override { return n_ > 0; }

   private:
    const uint32_t n_;
    uint32_t asked_ = 0;
  };

  struct Answer {
    std::vector<float> y, lse;
    Ledger ledger;
    uint32_t turns = 0;
  };
  // Runs a task of KV head 1 of layer 0 in turns that end at the n-th question.
  Answer Run(SessionImpl& session, std::span<const float> q, uint32_t n_queries, uint32_t n) {
    auto compute = Compute::Open("cpu");
    ScratchPool scratch;
    GatheredRowCache gathered(0);
    const StepParts parts{**compute, scratch, gathered};
    const LayerShape shape = spec_.geometry.layer(0);
    Answer answer{std::vector<float>(q.size() / shape.key_dim * shape.value_dim),
                  std::vector<float>(q.size() / shape.key_dim),
                  {}};
    GroupTask task;
    task.plan = *session.plan();
    task.head = 1;
    task.n_queries = n_queries;
    task.q = q, task.y = answer.y, task.lse = answer.lse;
    GroupTask* const one = &task;
    while (!task.done) {
      Turn turn(n);
      StepGroups(parts, {&one, 1}, turn);
      ++answer.turns;
      // What others compute meanwhile lies in the same buffers.
      const auto used = scratch.Acquire();
      std::ranges::fill(used->y, -1.f), std::ranges::fill(used->lse, -1.f);
    }
    EXPECT_TRUE(task.status.ok());
    answer.ledger = task.ledger;
    return answer;
  }
};

TEST_F(ExactPassTest, ACutPassReturnsTheSameBits) {
  const uint64_t seed = Seed("ExactPassTest.ACutPassReturnsTheSameBits");
  Open();
  // Three segments, so three batches of rows.
  auto prompt = MakePrompt(spec_.geometry, 900, seed);
  for (const uint32_t n : {300u, 600u, 900u}) {
    const std::vector<uint32_t> tokens(prompt.tokens.begin(), prompt.tokens.begin() + n);
    auto put = store_->BeginPut({spec_.name, "", tokens, ""});
    ASSERT_OK(put);
    const TokenRange missing = (*put)->missing();
    for (uint32_t l = 0; l < spec_.geometry.n_layers; ++l) {
      ASSERT_OK((*put)->Write(l, missing.begin, missing.size(),
                              prompt.K(l, missing.begin, missing.size()),
                              prompt.V(l, missing.begin, missing.size())));
    }
    ASSERT_OK((*put)->Commit());
  }
  StepPolicy policy;
  policy.mode = StepMode::kFull;
  const auto session = Attach(prompt, policy);
  ASSERT_TRUE(session);
  auto& impl = dynamic_cast<SessionImpl&>(*session);
  constexpr uint32_t kQueries = 8000;  // three pieces of each batch
  Random random(seed);
  const auto q = random.Normals(size_t{kQueries} * spec_.geometry.key_dim);
  const Answer whole = Run(impl, q, kQueries, 0);
  EXPECT_EQ(whole.turns, 1u);
  for (const uint32_t n : {1u, 2u, 3u}) {
    const Answer cut = Run(impl, q, kQueries, n);
    EXPECT_GE(cut.turns, 9 / n);
    EXPECT_EQ(cut.y, whole.y) << n;
    EXPECT_EQ(cut.lse, whole.lse) << n;
    EXPECT_EQ(cut.ledger.logical_bytes, whole.ledger.logical_bytes);
    EXPECT_EQ(cut.ledger.steps, 0u);
  }
  // A step in mode full: its two queries are one piece of each batch.
  const auto few = std::span(q).first(2 * spec_.geometry.key_dim);
  const Answer step = Run(impl, few, 0, 0), cut = Run(impl, few, 0, 1);
  EXPECT_EQ(step.turns, 1u);
  EXPECT_EQ(cut.turns, 3u);
  EXPECT_EQ(cut.y, step.y);
  EXPECT_EQ(cut.lse, step.lse);
  EXPECT_EQ(cut.ledger.steps, 1u);
  EXPECT_EQ(cut.ledger.retrieved_tokens, step.ledger.retrieved_tokens);
}

// Tenants whose passes and steps stop one another get what they get alone.
TEST_F(ExactPassTest, TenantsBesideOneAnotherGetWhatTheyGetAlone) {
  const uint64_t seed = Seed("ExactPassTest.TenantsBesideOneAnotherGetWhatTheyGetAlone");
  Open();
  constexpr uint32_t kPromptTokens = 3000, kQueries = 200;
  const auto prompt = MakePrompt(spec_.geometry, kPromptTokens, seed);
  const std::vector<std::string> tenants = {"a", "b", "c"};
  std::vector<std::shared_ptr<Session>> sessions;
  for (const std::string& tenant : tenants) {
    ASSERT_OK(store_->WaitReady(Put(prompt, true, 100, tenant), nullptr));
    StepPolicy policy;
    if (tenant == "b") policy.mode = StepMode::kFull;
    auto session = store_->Attach({spec_.name, tenant, prompt.tokens, "", 0, policy});
    ASSERT_OK(session);
    sessions.push_back(*session);
  }
  const auto ask = [&](size_t t) {
    const uint32_t n = t == 0 ? kQueries : 1;
    std::vector<float> answer(n * 64), lse(n * 4);
    const auto q = prompt.Q(0, kPromptTokens - n, n);
    const Status status = t == 0 ? sessions[t]->AttendExact(0, n, q, answer, lse)
                                 : sessions[t]->Step(0, {}, q, answer, lse, nullptr);
    EXPECT_TRUE(status.ok()) << status.error().ToString();
    answer.insert(answer.end(), lse.begin(), lse.end());
    return answer;
  };
  std::vector<std::vector<float>> alone;
  for (size_t t = 0; t < 3; ++t) alone.push_back(ask(t));
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (size_t i = 0; i < 6; ++i) {
    threads.emplace_back([&, t = i % 3] {
      for (int round = 0; round < (t == 0 ? 10 : 60); ++round) wrong += ask(t) != alone[t];
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

}  // namespace
}  // namespace prefixd::testing
