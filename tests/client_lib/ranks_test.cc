// Tests the ranks of an engine: each has a connection of its own, puts its own heads and steps
// them.
#include <atomic>
#include <csignal>
#include <thread>

#include "client_lib/connection.h"
#include "protocol/codec.h"
#include "tests/client_lib/put_parts.h"

namespace prefixd::testing {
namespace {

class Ranks : public PutParts {
 protected:
  std::unique_ptr<Store> NewClient() const {
    auto client = RemoteStore::Connect(
        GetParam() == Kind::kTcp ? daemon_->tcp_address() : daemon_->address(), {});
    EXPECT_TRUE(client.ok()) << (client.ok() ? "" : client.error().message);
    return client.ok() ? *std::move(client) : nullptr;
  }
};

TEST_P(Ranks, PutAndStepTheirHalvesOverARestart) {
  std::atomic<uint32_t> failed{0};
  std::vector<std::string> prefixes(2);
  std::vector<std::thread> ranks;
  for (uint32_t r = 0; r < 2; ++r) {
    ranks.emplace_back([&, r] {
      const auto client = NewClient();
      auto put = client->BeginPut(Spec({r, 1}, kPatience));
      if (!put.ok() || !Write(**put, {r, 1}).ok()) return void(++failed);
      const auto done = (*put)->Commit();
      if (!done.ok()) return void(++failed);
      prefixes[r] = done->prefix;
    });
  }
  for (std::thread& rank : ranks) rank.join();
  ASSERT_EQ(failed, 0u);
  EXPECT_EQ(prefixes[0], prefixes[1]);
  daemon_->Signal(SIGTERM);
  EXPECT_EQ(daemon_->Wait(), 0);
  daemon_ = std::make_unique<DaemonProcess>(dir_.path(),
                                            std::vector<std::string>{"--listen", "127.0.0.1:0"});
  ASSERT_TRUE(daemon_->ready()) << daemon_->Stderr();
  client_ = NewClient();
  Ready(prefixes[0]);
  const auto first = NewClient(), second = NewClient();
  ExpectHalvesOfAWholeStep(*first, *second, *reference_);
}

// A rank's process dies: its connection is gone without a word.
TEST_P(Ranks, AreToldWhenOneOfThemDies) {
  auto a = Begin(kFirst, kPatience);
  ASSERT_TRUE(a.ok() && Write(**a, kFirst).ok());
  const auto address =
      Address::Parse(GetParam() == Kind::kTcp ? daemon_->tcp_address() : daemon_->address());
  ASSERT_TRUE(address.ok());
  auto connection = Connection::Open(*address, {});
  ASSERT_TRUE(connection.ok()) << connection.error().message;
  Connection::Call begin{wire::MessageType::kBeginPut};
  begin.control = {{"put", wire::ToJson(Spec(kSecond))}};
  begin.in = {wire::BytesOf(std::span<const uint32_t>(prompt_.tokens))};
  const auto begun = (*connection)->Do(std::move(begin));
  ASSERT_TRUE(begun.ok()) << begun.error().message;
  Result<PutResult> told = Error{};
  std::thread rank([&] { told = (*a)->Commit(); });
  connection->reset();
  rank.join();
  ASSERT_FALSE(told.ok());
  EXPECT_EQ(told.error().code, Code::kUnavailable);
  EXPECT_NE(told.error().message.find("KV heads 1..2 of this put was aborted, or its client is "
                                      "gone"),
            std::string::npos)
      << told.error().message;
  ExpectNothingReserved();
  EXPECT_TRUE(client_->ListPrefixes({})->prefixes.empty());
}

// The daemon gives up a part that nothing is written to, and with it the put.
class IdleRanks : public Ranks {
 protected:
  void Limit(RuntimeOptions& /*options*/, std::vector<std::string>& args) const override {
    args.insert(args.end(), {"--put-idle", "4"});
  }
};

TEST_P(IdleRanks, EndThePutForTheOthers) {
  auto b = Begin(kSecond);  // and forgets it
  ASSERT_TRUE(b.ok());
  auto a = Begin(kFirst, kPatience);
  ASSERT_TRUE(a.ok());
  const auto told = (*a)->Commit();  // without rows: it is not waiting yet
  EXPECT_EQ(told.error().code, Code::kFailedPrecondition);
  Status written = Write(**a, kFirst);
  if (written.ok()) written = StatusOf((*a)->Commit());  // waits until `b` is idle for too long
  ASSERT_FALSE(written.ok());
  EXPECT_EQ(written.error().code, Code::kUnavailable) << written.error().message;
}

const auto kConnected = ::testing::Values(Kind::kUnixShared, Kind::kTcp);
INSTANTIATE_TEST_SUITE_P(Clients, Ranks, kConnected, KindName);
INSTANTIATE_TEST_SUITE_P(Clients, IdleRanks, kConnected, KindName);

}  // namespace
}  // namespace prefixd::testing
