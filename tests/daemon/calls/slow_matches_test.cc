// Matches on a slow disk, through the daemon: they hold up neither steps nor other matches of the
// same client, nor wait for them, and a client that goes away does not wait for them.
#include <future>

#include "storage/store/open_store.h"
#include "storage/store/prefix_store.h"
#include "tests/daemon/daemon_in_process.h"
#include "tests/runtime/runtime_fixture.h"
#include "tests/runtime/wait_checked.h"
#include "tests/storage/io/faulty_engine.h"
#include "tests/support/ends.h"

namespace prefixd::testing {
namespace {

using std::chrono::hours;
using std::chrono::milliseconds;

class SlowMatchesTest : public RuntimeTest {
 protected:
  SlowMatchesTest() {
    plan_->reads_only = true;
    options_.recluster = false;
    options_.scrub_bytes_per_second = 0;
    const uint64_t seed = Seed("SlowMatches");
    slow_ = MakePrompt(spec_.geometry, 300, seed);
    other_ = MakePrompt(spec_.geometry, 300, seed + 1);
    policy_.k = 25;
    policy_.selector = "exact";
  }
  ~SlowMatchesTest() override {
    if (engine_) engine_->Release();
  }

  void SetUp() override {
    Open();
    slow_id_ = PutReady(slow_);
    other_id_ = PutReady(other_);
    store_.reset();
    auto opened = LocalStore::Open(options_, [this](const storage::StoreOptions& at) {
      return storage::OpenStoreWithEngine(at, [this](std::unique_ptr<storage::IoEngine> inner) {
        auto engine = std::make_unique<storage::FaultyEngine>(std::move(inner), plan_);
        engine_ = engine.get();
        return engine;
      });
    });
    ASSERT_OK(opened);
    daemon_ = std::make_unique<daemon::DaemonInProcess>(*std::move(opened));
    client_ = daemon_->Connect();
    ASSERT_TRUE(client_);
    prefixd::testing::WaitChecked(*client_);
  }

  Result<std::shared_ptr<Session>> AttachOther() {
    return client_->Attach({spec_.name, "", other_.tokens, "", 0, policy_});
  }
  bool EndsWhileHeld(const std::function<void()>& call) {
    return Ends(call, [this] { engine_->Release(); });
  }

  std::shared_ptr<storage::FaultPlan> plan_ = std::make_shared<storage::FaultPlan>();
  storage::FaultyEngine* engine_ = nullptr;  // owned by the store
  SyntheticPrompt slow_, other_;
  StepPolicy policy_;
  std::string slow_id_, other_id_;
  std::unique_ptr<daemon::DaemonInProcess> daemon_;
  std::unique_ptr<RemoteStore> client_;
};

TEST_F(SlowMatchesTest, HoldUpNothingElse) {
  const auto session = AttachOther();
  ASSERT_OK(session);
  plan_->Arm(storage::Fault::kHang, 1, false);
  do {  // a match whose turn comes after its deadline reads nothing
    auto pending =
        client_->MatchAsync({.model = spec_.name, .tokens = slow_.tokens}, milliseconds(20));
    ASSERT_OK(pending);
    EXPECT_CODE((*pending)->Get(), Code::kDeadlineExceeded);
  } while (plan_->injected == 0);
  EXPECT_TRUE(EndsWhileHeld([&] {
    for (uint32_t l = 0; l < spec_.geometry.n_layers; ++l) {
      Step(**session, l, other_.Q(l, 299, 1));
    }
    auto match = client_->MatchAsync({.model = spec_.name, .tokens = other_.tokens}, hours(1));
    ASSERT_OK(match);
    const auto found = (*match)->Get();
    ASSERT_OK(found);
    EXPECT_EQ(found->prefix, other_id_);
    ASSERT_OK(client_->Stats());
  }));
  engine_->Release();
  auto again = client_->MatchAsync({.model = spec_.name, .tokens = slow_.tokens}, hours(1));
  ASSERT_OK(again);
  const auto found = (*again)->Get();
  ASSERT_OK(found);
  EXPECT_EQ(found->prefix, slow_id_);
}

// A client that sends its calls without waiting: the match it sent first does not hold up the rest.
TEST_F(SlowMatchesTest, OfAnotherThreadHoldUpNoWorker) {
  const auto session = AttachOther();
  ASSERT_OK(session);
  std::vector<std::unique_ptr<RemoteStore>> clients;
  std::vector<std::future<Result<PrefixMatch>>> held;
  for (int i = 0; i < 3; ++i) {  // as many as one tenant gets of the daemon's workers
    clients.push_back(daemon_->Connect());
    plan_->Arm(storage::Fault::kHang, 1, false);
    held.push_back(std::async(std::launch::async, [&, c = clients.back().get()] {
      return c->Match({.model = spec_.name, .tokens = slow_.tokens});
    }));
    plan_->AwaitInjected();
  }
  EXPECT_TRUE(EndsWhileHeld([&] {
    Step(**session, 0, other_.Q(0, 299, 1));
    ASSERT_OK(client_->Stats());
  }));
  engine_->Release();
  for (auto& match : held) {
    const auto found = match.get();
    ASSERT_OK(found);
    EXPECT_EQ(found->prefix, slow_id_);
  }
}

TEST_F(SlowMatchesTest, AClientThatGoesAwayDoesNotWait) {
  plan_->Arm(storage::Fault::kHang, 1, false);
  auto pending = client_->MatchAsync({.model = spec_.name, .tokens = slow_.tokens}, hours(1));
  ASSERT_OK(pending);
  plan_->AwaitInjected();
  EXPECT_TRUE(EndsWhileHeld([&] { client_.reset(); }));
  EXPECT_FALSE((*pending)->Get().ok());
  engine_->Release();
}

TEST_F(SlowMatchesTest, ADaemonThatIsGoneIsAnError) {
  auto pending = client_->MatchAsync({.model = spec_.name, .tokens = other_.tokens}, hours(1));
  ASSERT_OK(pending);
  ASSERT_OK((*pending)->Get());
  EXPECT_EQ(daemon_->Stop(), 0);
  engine_ = nullptr;  // went with the store
  for (int i = 0; i < 2; ++i) {
    pending = client_->MatchAsync({.model = spec_.name, .tokens = other_.tokens}, hours(1));
    ASSERT_OK(pending);
    EXPECT_FALSE((*pending)->Get().ok());
  }
}

}  // namespace
}  // namespace prefixd::testing
