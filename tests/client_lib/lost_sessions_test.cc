// Tests what a session says of itself when its daemon goes away or does not answer: the truth or an
// error, in bounded time.
#include <chrono>
#include <csignal>
#include <memory>
#include <thread>

#include "tests/client_lib/client_scenario.h"

namespace prefixd::testing {
namespace {

class LostSessions : public ClientScenario {
 protected:
  std::unique_ptr<Store> Connected(uint32_t reconnect_ms) const {
    ConnectOptions options;
    options.reconnect_ms = reconnect_ms;
    options.shared_memory = GetParam() != Kind::kUnixInline;
    auto client = Connect(Remote() ? daemon_->tcp_address() : daemon_->address(), options);
    EXPECT_TRUE(client.ok()) << (client.ok() ? "" : client.error().message);
    return client.ok() ? *std::move(client) : nullptr;
  }
  void Step(Session& session) {
    std::vector<float> y(kQHeads * kDim), lse(kQHeads);
    ASSERT_TRUE(session.Step(0, Queries(1, 7), y, lse, nullptr).ok());
  }
  void Kill() {
    daemon_->Signal(SIGKILL);
    EXPECT_EQ(daemon_->Wait(), 128 + SIGKILL);
  }
};

TEST_P(LostSessions, SayNothingOldAndEndInOrder) {
  constexpr uint64_t kThree = 3 * 2;  // steps of both KV heads
  Put(*client_);
  const auto client = Connected(0);
  const auto asked = Attach(*client), never_asked = Attach(*client);
  ASSERT_TRUE(asked && never_asked);
  for (int i = 0; i < 3; ++i) Step(*asked), Step(*never_asked);
  EXPECT_EQ(asked->report()->total.steps, kThree);
  Kill();
  for (const auto& session : {asked, never_asked}) {
    const auto report = session->report();
    ASSERT_FALSE(report.ok()) << "an old report: " << report->total.steps << " steps";
    EXPECT_EQ(report.error().code, Code::kUnavailable) << report.error().message;
  }
  // The daemon has ended the sessions: to end them is done.
  const auto last = asked->Detach(), none = never_asked->Detach();
  ASSERT_TRUE(last.ok()) << last.error().message;
  EXPECT_EQ(last->total.steps, kThree);
  EXPECT_EQ(last->info.n_tokens, kTokens);
  ASSERT_TRUE(none.ok()) << none.error().message;
  EXPECT_EQ(none->total.steps, 0u);
  EXPECT_EQ(asked->Detach().error().code, Code::kFailedPrecondition);
  EXPECT_EQ(asked->report()->total.steps, kThree);  // what Detach returned
}

TEST_P(LostSessions, ReportsFindTheDaemonAgain) {
  if (Remote()) GTEST_SKIP() << "the next daemon has another port";
  Put(*client_);
  const auto session = Attach(*client_), with_own = Attach(*client_);
  ASSERT_TRUE(session && with_own);
  Step(*session);
  const std::vector<std::byte> row(2 * kDim * 2);
  ASSERT_TRUE(with_own->Append(0, 1, row, row).ok());
  EXPECT_EQ(with_own->report()->own_tokens, 1u);
  Kill();
  daemon_ = std::make_unique<DaemonProcess>(dir_.path(), std::vector<std::string>());
  ASSERT_TRUE(daemon_->ready()) << daemon_->Stderr();
  const auto report = session->report();
  ASSERT_TRUE(report.ok()) << report.error().message;
  EXPECT_EQ(report->info.prefix, session->info().prefix);
  EXPECT_EQ(report->total.steps, 0u);  // its ledger has begun anew
  const auto lost = with_own->report();
  ASSERT_FALSE(lost.ok()) << "own tokens that are gone: " << lost->own_tokens;
  EXPECT_NE(lost.error().message.find("own tokens ended"), std::string::npos)
      << lost.error().message;
  EXPECT_TRUE(session->Detach().ok());
}

// Removals are not sent twice, so they must not go over a connection whose end nobody has noticed.
TEST_P(LostSessions, RemovalsFindTheDaemonAgain) {
  if (Remote()) GTEST_SKIP() << "the next daemon has another port";
  Put(*client_);
  const auto client = Connected(30000);
  const auto restart = [&] {
    Kill();
    daemon_ = std::make_unique<DaemonProcess>(dir_.path(), std::vector<std::string>());
    ASSERT_TRUE(daemon_->ready()) << daemon_->Stderr();
  };
  ASSERT_NO_FATAL_FAILURE(restart());
  const Status removed = client->Remove(prefix_);
  EXPECT_TRUE(removed.ok()) << removed.error().message;
  ASSERT_NO_FATAL_FAILURE(restart());
  const Status model = client->RemoveModel(prompt_.model.name);
  EXPECT_TRUE(model.ok()) << model.error().message;
}

// The connection allows two minutes for a call, the sessions a fifth of a second.
TEST_P(LostSessions, EndInTheirTime) {
  Put(*client_);
  std::vector<std::unique_ptr<Store>> clients;
  std::vector<std::shared_ptr<Session>> sessions;
  for (int i = 0; i < 3; ++i) {
    clients.push_back(Connected(0));
    AttachSpec spec{.model = prompt_.model.name, .tokens = prompt_.tokens};
    spec.policy.mode = StepMode::kFull;
    spec.call_timeout_ms = 200;
    auto session = clients.back()->Attach(spec);
    ASSERT_TRUE(session.ok()) << session.error().message;
    sessions.push_back(*std::move(session));
  }
  daemon_->Signal(SIGSTOP);
  const auto begun = std::chrono::steady_clock::now();
  Status reported, detached;
  std::thread report([&] {
    const auto r = sessions[0]->report();
    if (!r.ok()) reported = r.error();
  });
  std::thread detach([&] {
    const auto r = sessions[1]->Detach();
    if (!r.ok()) detached = r.error();
  });
  sessions[2].reset();
  report.join();
  detach.join();
  const auto took = std::chrono::steady_clock::now() - begun;
  daemon_->Signal(SIGCONT);
  EXPECT_FALSE(reported.ok());
  EXPECT_FALSE(detached.ok());
  EXPECT_LT(took, std::chrono::seconds(60));
}

// A commit takes as long as it takes, and meanwhile it has the turn of its connection.
class LongCommit {
 public:
  LongCommit(Store& store, DaemonProcess& daemon, const Prompt& prompt) : daemon_(daemon) {
    auto put = store.BeginPut({prompt.model.name, "", prompt.tokens, ""});
    EXPECT_TRUE(put.ok());
    if (!put.ok()) return;
    put_ = *std::move(put);
    const auto n = static_cast<uint32_t>(prompt.tokens.size());
    for (uint32_t l = 0; l < prompt.k.size(); ++l) {
      EXPECT_TRUE(put_->Write(l, 0, n, prompt.k[l], prompt.v[l]).ok());
    }
    daemon_.Signal(SIGSTOP);
    commit_ = std::thread([this] { EXPECT_TRUE(put_->Commit().ok()); });
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
  }
  ~LongCommit() { End(); }
  void End() {
    daemon_.Signal(SIGCONT);
    if (commit_.joinable()) commit_.join();
  }

 private:
  DaemonProcess& daemon_;
  std::unique_ptr<PutStream> put_;
  std::thread commit_;
};

TEST_P(LostSessions, NoneIsLeftWhereAnotherCallHasTheTurn) {
  Put(*client_);
  const auto client = Connected(0);
  AttachSpec spec{.model = prompt_.model.name, .tokens = prompt_.tokens};
  spec.policy.mode = StepMode::kFull;
  spec.call_timeout_ms = 2000;  // also of the attach, on a slow machine
  auto session = client->Attach(spec);
  ASSERT_TRUE(session.ok()) << session.error().message;
  EXPECT_EQ(client_->Stats()->sessions, 1u);
  LongCommit commit(*client, *daemon_, MakePrompt(90, Seed("LostSessions.Turn")));
  session->reset();
  commit.End();
  for (int i = 0; i < 1000 && client_->Stats()->sessions > 0; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  EXPECT_EQ(client_->Stats()->sessions, 0u);
  EXPECT_TRUE(client->Stats().ok());  // the answer to nobody's call is passed over
}

TEST_P(LostSessions, ACallsTimeCountsItsWaitForTheTurn) {
  Put(*client_);
  ConnectOptions options;
  options.call_timeout_ms = 2000;
  options.shared_memory = GetParam() != Kind::kUnixInline;
  auto client = Connect(Remote() ? daemon_->tcp_address() : daemon_->address(), options);
  ASSERT_TRUE(client.ok());
  LongCommit commit(**client, *daemon_, MakePrompt(90, Seed("LostSessions.Waits")));
  const auto late = (*client)->Stats();
  ASSERT_FALSE(late.ok());
  EXPECT_EQ(late.error().code, Code::kDeadlineExceeded) << late.error().message;
  commit.End();
  EXPECT_TRUE((*client)->Stats().ok());
}

INSTANTIATE_TEST_SUITE_P(Clients, LostSessions,
                         ::testing::Values(Kind::kUnixShared, Kind::kUnixInline, Kind::kTcp),
                         KindName);

}  // namespace
}  // namespace prefixd::testing
