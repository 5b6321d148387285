// Holds a read that one call needs, and checks that calls for other prefixes do not wait for it.
#include <future>

#include "base/every_page.h"
#include "storage/store/open_store.h"
#include "storage/store/prefix_store.h"
#include "tests/runtime/runtime_fixture.h"
#include "tests/runtime/wait_checked.h"
#include "tests/storage/io/faulty_engine.h"
#include "tests/support/ends.h"

namespace prefixd::testing {
namespace {

class SlowDiskTest : public RuntimeTest {
 protected:
  SlowDiskTest() {
    plan_->reads_only = true;
    options_.recluster = false;
    options_.host_tier_bytes = 0;
    options_.scrub_bytes_per_second = 0;
    policy_.k = 25;
    policy_.selector = "exact";
  }
  ~SlowDiskTest() override {
    if (engine_) engine_->Release();
  }

  // Opens the store: nothing of what it holds is in memory.
  void OpenCold() {
    store_.reset();
    engine_ = nullptr;
    auto opened = LocalStore::Open(options_, [this](const storage::StoreOptions& at) {
      return storage::OpenStoreWithEngine(at, [this](std::unique_ptr<storage::IoEngine> inner) {
        auto engine = std::make_unique<storage::FaultyEngine>(std::move(inner), plan_);
        engine_ = engine.get();
        return engine;
      });
    });
    ASSERT_OK(opened);
    store_ = *std::move(opened);
    testing::WaitChecked(*store_);
  }

  Result<std::shared_ptr<Session>> AttachTo(const std::string& prefix) {
    AttachSpec spec;
    spec.model = spec_.name;
    spec.prefix = prefix;
    spec.policy = policy_;
    return store_->Attach(spec);
  }

  bool EndsWhileHeld(const std::function<void()>& call) {
    return Ends(call, [this] { engine_->Release(); });
  }

  std::shared_ptr<storage::FaultPlan> plan_ = std::make_shared<storage::FaultPlan>();
  storage::FaultyEngine* engine_ = nullptr;  // owned by the store
  StepPolicy policy_;
};

TEST_F(SlowDiskTest, AColdAttachHoldsUpNobodyElse) {
  const uint64_t seed = Seed("AColdAttachHoldsUpNobodyElse");
  Open();
  const auto one = MakePrompt(spec_.geometry, 300, seed),
             two = MakePrompt(spec_.geometry, 300, seed + 1);
  const std::string slow = PutReady(one), other = PutReady(two);
  const std::string removed = PutReady(MakePrompt(spec_.geometry, 300, seed + 2));
  OpenCold();
  plan_->Arm(storage::Fault::kHang, 1, false);
  auto attached = std::async(std::launch::async, [&] { return AttachTo(slow); });
  plan_->AwaitInjected();
  EXPECT_TRUE(EndsWhileHeld([&] {
    const auto session = AttachTo(other);
    ASSERT_OK(session);
    Step(**session, 1, two.Q(1, 299, 1));
    const auto match = store_->Match({.model = spec_.name, .tokens = two.tokens});
    ASSERT_OK(match);
    EXPECT_EQ(match->prefix, other);
    ASSERT_OK(store_->Remove(removed));
    ASSERT_OK(store_->Stats());
    ASSERT_EQ(EveryPrefix(*store_)->size(), 2u);
  }));
  // Others who want the same prefix wait for the one that loads it, and share what it loads.
  auto second = std::async(std::launch::async, [&] { return AttachTo(slow); });
  const uint64_t reads = plan_->counted;
  engine_->Release();
  const auto a = attached.get(), b = second.get();
  ASSERT_OK(a);
  ASSERT_OK(b);
  const uint64_t both = plan_->counted - reads;
  const auto q = one.Q(1, 299, 1);
  EXPECT_EQ(Step(**a, 1, q).y, Step(**b, 1, q).y);
  EXPECT_LE(both, 8u);
}

TEST_F(SlowDiskTest, AFailedAttachSpoilsNoLaterOne) {
  Open();
  const auto prompt = MakePrompt(spec_.geometry, 300, Seed("AFailedAttachSpoilsNoLaterOne"));
  const std::string prefix = PutReady(prompt);
  OpenCold();
  for (int i = 0; i < 2; ++i) {
    plan_->Arm(storage::Fault::kEio, 1, true);
    EXPECT_CODE(AttachTo(prefix), Code::kIo);
    plan_->Disarm();
  }
  const auto session = AttachTo(prefix);
  ASSERT_OK(session);
  Step(**session, 1, prompt.Q(1, 299, 1));
}

// A prefix that is removed while it is opened is not kept for later sessions.
TEST_F(SlowDiskTest, WhatIsForgottenWhileItIsOpenedServesNoLaterSession) {
  Open();
  const auto prompt = MakePrompt(spec_.geometry, 300, Seed("WhatIsForgotten"));
  const std::string prefix = PutReady(prompt);
  OpenCold();
  plan_->Arm(storage::Fault::kHang, 1, false);
  auto attached = std::async(std::launch::async, [&] { return AttachTo(prefix); });
  plan_->AwaitInjected();
  EXPECT_TRUE(EndsWhileHeld(
      [&] { EXPECT_CODE(store_->Remove(prefix), Code::kFailedPrecondition); }));  // it is open
  engine_->Release();
  auto session = attached.get();
  ASSERT_OK(session);
  Step(**session, 1, prompt.Q(1, 299, 1));
  *session = nullptr;
  EXPECT_EQ(store_->Stats()->selector_memory_bytes, 0u);  // nothing idle is left of it
  ASSERT_OK(store_->Remove(prefix));
  EXPECT_CODE(AttachTo(prefix), Code::kNotFound);
}

TEST_F(SlowDiskTest, AMatchThatNobodyWaitsForKeepsToItsDeadline) {
  const uint64_t seed = Seed("AMatchThatNobodyWaitsFor");
  Open();
  const auto one = MakePrompt(spec_.geometry, 300, seed),
             two = MakePrompt(spec_.geometry, 300, seed + 1);
  const std::string slow = PutReady(one), other = PutReady(two);
  OpenCold();
  plan_->Arm(storage::Fault::kHang, 1, false);
  std::vector<std::unique_ptr<PendingMatch>> late;
  for (int i = 0; i < 20; ++i) {  // a scheduler that asks again and again
    auto match = store_->MatchAsync({.model = spec_.name, .tokens = one.tokens},
                                    std::chrono::milliseconds(i == 0 ? 2000 : 1));
    ASSERT_OK(match);
    EXPECT_CODE((*match)->Get(), Code::kDeadlineExceeded);
    EXPECT_TRUE((*match)->ready());
    late.push_back(*std::move(match));
  }
  plan_->AwaitInjected();
  EXPECT_TRUE(EndsWhileHeld([&] {
    auto match =
        store_->MatchAsync({.model = spec_.name, .tokens = two.tokens}, std::chrono::hours(1));
    ASSERT_OK(match);
    const auto found = (*match)->Get();
    ASSERT_OK(found);
    EXPECT_EQ(found->prefix, other);
    EXPECT_EQ(found->n_tokens, 300u);
  }));
  engine_->Release();
  // The first match went on, and its answer came after all.
  auto again =
      store_->MatchAsync({.model = spec_.name, .tokens = one.tokens}, std::chrono::hours(1));
  ASSERT_OK(again);
  ASSERT_OK((*again)->Get());
  const auto first = late.front()->Get();
  ASSERT_OK(first);
  EXPECT_EQ(first->prefix, slow);
  // Errors are those of Match.
  auto unknown =
      store_->MatchAsync({.model = "unknown", .tokens = one.tokens}, std::chrono::hours(1));
  ASSERT_OK(unknown);
  EXPECT_CODE((*unknown)->Get(), Code::kNotFound);
  // A handle outlives its store.
  engine_ = nullptr;
  store_.reset();
  ASSERT_OK((*again)->Get());
}

}  // namespace
}  // namespace prefixd::testing
