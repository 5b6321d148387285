// Tests how long a connection of the client library waits for its answers, and what an exception
// in the middle of a call leaves of it.
#include <future>
#include <stdexcept>

#include "base/call_scope.h"
#include "client_lib/connection.h"
#include "tests/daemon/connections/ring_fixture.h"

namespace prefixd::testing {
namespace {

using wire::Json;
using wire::MessageType;

class WaitingClients : public RingTest {
 protected:
  std::shared_ptr<Connection> Open() {
    auto connection = Connection::Open(*Address::Parse(daemon_->address()), {});
    EXPECT_OK(connection);
    return connection.ok() ? *std::move(connection) : nullptr;
  }

  static Result<Connection::Reply> BeginPut(Connection& connection) {
    const std::vector<uint32_t> tokens = {1};
    return connection.Do({MessageType::kBeginPut,
                          {{"put", {{"model", "m"}}}},
                          {wire::BytesOf(std::span<const uint32_t>(tokens))},
                          {},
                          nullptr,
                          {}});
  }

  const ProgressFn goes_on_ = [](uint64_t, uint64_t, std::string_view) { return true; };
};

// The daemon commits whatever becomes of the call, and the connection has more to lose than time.
TEST_F(WaitingClients, AwaitTheEndOfACommitThatHasBegun) {
  const auto connection = Open();
  ASSERT_TRUE(connection);
  const auto begun = BeginPut(*connection);
  ASSERT_OK(begun);
  control_->Hold();
  CallCanceller canceller;
  auto committed = std::async(std::launch::async, [&] {
    const CallScope scope(CallLimits::Of(2000, &canceller));
    return connection->Do(
        {MessageType::kPutCommit, {{"put", begun->control["put"]}}, {}, {}, &goes_on_, {}});
  });
  control_->AwaitHeld(1);
  canceller.Cancel();
  EXPECT_EQ(committed.wait_for(Connection::kGrace + std::chrono::milliseconds(2500)),
            std::future_status::timeout);
  control_->Release();
  EXPECT_OK(committed.get());
  EXPECT_TRUE(connection->alive());
}

TEST_F(WaitingClients, GiveTheConnectionUpWithACommitThatTheyDoNotWaitFor) {
  const auto connection = Open();
  ASSERT_TRUE(connection);
  const auto begun = BeginPut(*connection);
  ASSERT_OK(begun);
  control_->Hold();
  auto committed = std::async(std::launch::async, [&] {
    const CallScope scope(CallLimits::Of(500, nullptr));
    Connection::Call call{
        MessageType::kPutCommit, {{"put", begun->control["put"]}}, {}, {}, &goes_on_, {}};
    call.gives_up = true;
    return connection->Do(std::move(call));
  });
  control_->AwaitHeld(1);
  EXPECT_CODE(committed.get(), Code::kUnavailable);
  EXPECT_FALSE(connection->alive());
  control_->Release();
}

// What was in flight is still the daemon's to read; the next call's tensors would lie over it.
TEST_F(WaitingClients, AnExceptionInACallEndsItsConnection) {
  const auto connection = Open();
  ASSERT_TRUE(connection);
  control_->Hold();
  const ProgressFn throws = [](uint64_t, uint64_t, std::string_view) -> bool {
    throw std::runtime_error("of the caller");
  };
  EXPECT_THROW(
      (void)connection->Do({MessageType::kWaitReady, {{"prefix", "p"}}, {}, {}, &throws, {}}),
      std::runtime_error);
  EXPECT_FALSE(connection->alive());
  EXPECT_CODE(connection->Do({MessageType::kStats, Json::object(), {}, {}, nullptr, {}}),
              Code::kUnavailable);
}

}  // namespace
}  // namespace prefixd::testing
