// Tests that calls of one tenant hold up no other's, and what a daemon that stops says to calls
// that wait: through the daemon, over a store whose calls are held.
#include <algorithm>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/daemon/connections/raw_client.h"
#include "tests/daemon/connections/stepping_store.h"
#include "tests/daemon/daemon_in_process.h"
#include "tests/support/ends.h"
#include "tests/support/expect_ok.h"
#include "tests/support/test.h"

namespace prefixd::testing {
namespace {

using wire::Json;
using wire::MessageType;

class SharesTest : public ::testing::Test {
 protected:
  static constexpr int kCalls = 20;

  SharesTest() {
    daemon::Config config;
    config.long_workers = 4;
    config.workers = 4;
    daemon_ = std::make_unique<daemon::DaemonInProcess>(std::make_unique<SteppingStore>(control_),
                                                        config);
  }
  ~SharesTest() override { control_->Release(); }

  std::unique_ptr<RawClient> Greedy() {
    auto client = std::make_unique<RawClient>(daemon_->address());
    EXPECT_TRUE(
        client->Call(MessageType::kHello, {{"tenant", "greedy"}, {"shared_memory", false}}).ok());
    return client;
  }
  std::unique_ptr<RemoteStore> Other() {
    ConnectOptions options;
    options.tenant = "other";
    return daemon_->Connect(options);
  }
  // Waits until the greedy tenant has its three threads, and a moment longer for the fourth, which
  // it does not get.
  void AwaitShare() {
    control_->AwaitHeld(3);
    for (int i = 0; i < 40 && control_->Held() < 4; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  }
  // Calls of the greedy tenant that take all of its threads, and are held.
  std::vector<std::unique_ptr<RawClient>> HoldShare() {
    std::vector<std::unique_ptr<RawClient>> clients;
    control_->Hold();
    for (int i = 0; i < 3; ++i) {
      clients.push_back(Greedy());
      EXPECT_OK(clients.back()->Send(MessageType::kRemove, {{"prefix", "greedy/p"}}));
    }
    AwaitShare();
    return clients;
  }
  bool EndsWhileHeld(const std::function<void()>& call) {
    return Ends(call, [this] { control_->Release(); });
  }

  const std::shared_ptr<SteppingStore::Control> control_ =
      std::make_shared<SteppingStore::Control>();
  std::unique_ptr<daemon::DaemonInProcess> daemon_;
};

TEST_F(SharesTest, WaitsOfOneTenantHoldUpNoVerifyOfAnother) {
  const auto greedy = Greedy();
  const auto other = Other();
  ASSERT_TRUE(other);
  control_->Hold();
  for (int i = 0; i < kCalls; ++i) {
    ASSERT_TRUE(greedy->Send(MessageType::kWaitReady, {{"prefix", "greedy/p"}}).ok());
  }
  AwaitShare();
  EXPECT_TRUE(EndsWhileHeld([&] { ASSERT_OK(other->Verify("other/p", nullptr)); }));
  control_->Release();
  for (int i = 0; i < kCalls; ++i) EXPECT_TRUE(greedy->Receive().ok());
}

TEST_F(SharesTest, MatchesOfOneTenantHoldUpNoMatchOfAnother) {
  const auto greedy = Greedy();
  const auto other = Other();
  ASSERT_TRUE(other);
  control_->Hold();
  const std::vector<std::byte> token(4);
  const Json match = {{"match", {{"model", "m"}, {"tenant", "greedy"}}}, {"in", {{0, 4}}}};
  for (int i = 0; i < kCalls; ++i)
    ASSERT_TRUE(greedy->Send(MessageType::kMatch, match, 0, token).ok());
  AwaitShare();
  // The match of the other tenant reaches the store, where it is held, too.
  auto pending =
      other->MatchAsync({.model = "m", .tenant = "other", .tokens = {1, 2}}, std::chrono::hours(1));
  ASSERT_OK(pending);
  EXPECT_TRUE(Eventually([&] { return std::ranges::count(control_->Order(), 2u) == 1; }));
  control_->Release();
  EXPECT_OK((*pending)->Get());
  for (int i = 0; i < kCalls; ++i) EXPECT_TRUE(greedy->Receive().ok());
}

TEST_F(SharesTest, CallsInTurnOfOneTenantHoldUpNoneOfAnother) {
  const auto other = Other();
  ASSERT_TRUE(other);
  std::vector<std::unique_ptr<RawClient>> clients;
  control_->Hold();
  for (int i = 0; i < 5; ++i) {  // more than there are workers
    clients.push_back(Greedy());
    ASSERT_TRUE(clients.back()->Send(MessageType::kRemove, {{"prefix", "greedy/p"}}).ok());
  }
  AwaitShare();
  EXPECT_TRUE(EndsWhileHeld([&] { ASSERT_OK(other->Stats()); }));
  control_->Release();
  for (const auto& client : clients) EXPECT_TRUE(client->Receive().ok());
}

// Its connection would be given up by a client that waits for the answer.
TEST_F(SharesTest, ACancelledCallThatWaitsForAThreadIsAnsweredAtOnce) {
  const auto clients = HoldShare();
  const auto late = Greedy();
  EXPECT_TRUE(EndsWhileHeld([&] {
    for (int i = 0; i < 60; ++i) {
      ASSERT_OK(late->Send(MessageType::kRemove, {{"prefix", "greedy/p"}}, 7));
      ASSERT_OK(late->Send(MessageType::kCancel, {{"request", 7}}));
      const auto ended = late->Receive();
      EXPECT_CODE(ended, Code::kCancelled);
    }
  }));
  ASSERT_OK(late->Send(MessageType::kRemove, {{"prefix", "greedy/p"}}));
  control_->Release();
  EXPECT_OK(late->Receive());
  for (const auto& client : clients) EXPECT_OK(client->Receive());
}

// The daemon looks at the deadline of what it carries out; what waits for a thread the client ends.
TEST_F(SharesTest, ACallThatWaitsForAThreadEndsAtItsDeadline) {
  const auto clients = HoldShare();
  ConnectOptions options;
  options.tenant = "greedy";
  options.call_timeout_ms = 1500;
  const auto late = daemon_->Connect(options);
  ASSERT_TRUE(late);
  EXPECT_TRUE(EndsWhileHeld([&] { EXPECT_CODE(late->Stats(), Code::kDeadlineExceeded); }));
  control_->Release();
  EXPECT_OK(late->Stats());
  for (const auto& client : clients) EXPECT_OK(client->Receive());
}

// Those that run and those that wait for their tenant's share are told alike.
TEST_F(SharesTest, ADaemonThatStopsTellsWaitingCallsThatTheyAreCancelled) {
  control_->heeds = true;
  const auto client = Greedy();
  control_->Hold();
  for (int i = 0; i < kCalls; ++i) {
    ASSERT_TRUE(client->Send(MessageType::kWaitReady, {{"prefix", "greedy/p"}}).ok());
  }
  AwaitShare();
  EXPECT_TRUE(EndsWhileHeld([&] { EXPECT_EQ(daemon_->Stop(), 0); }));
  for (int i = 0; i < kCalls; ++i) {
    const auto ended = client->Receive();
    EXPECT_CODE(ended, Code::kCancelled);
  }
}

}  // namespace
}  // namespace prefixd::testing
