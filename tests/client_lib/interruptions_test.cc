// Tests what a client notices of a daemon that is killed and started again: nothing, where it may
// wait and the prefix is still there, and otherwise kUnavailable at once.
#include <signal.h>

#include <atomic>
#include <future>
#include <optional>
#include <thread>

#include "base/every_page.h"
#include "tests/client_lib/client_scenario.h"

namespace prefixd::testing {
namespace {

enum class Over { kUnixShared, kUnixInline, kTcp };

class Interruptions : public ::testing::TestWithParam<Over> {
 protected:
  void SetUp() override {
    prompt_ = MakePrompt(kTokens, Seed("Interruptions"));
    Start("127.0.0.1:0");
    auto reference = Open(SmallStore(dir_.path() / "reference"));
    ASSERT_TRUE(reference.ok()) << reference.error().message;
    reference_ = *std::move(reference);
    ASSERT_TRUE(PutReady(*reference_));
    client_ = Connected(30000);
    ASSERT_TRUE(client_ && PutReady(*client_));
  }

  void Start(const std::string& listen, std::vector<std::string> more = {}) {
    more.insert(more.end(), {"--listen", listen});
    daemon_ = std::make_unique<DaemonProcess>(dir_.path(), more);
    ASSERT_TRUE(daemon_->ready()) << daemon_->Stderr();
    port_ = daemon_->tcp_address().substr(4);  // the same after a restart
  }
  void Kill() {
    daemon_->Signal(SIGKILL);
    EXPECT_EQ(daemon_->Wait(), 128 + SIGKILL);
  }
  void Restart() {
    Kill();
    Start(port_);
  }
  void RestartInOrder() {
    daemon_->Signal(SIGTERM);
    EXPECT_EQ(daemon_->Wait(), 0) << daemon_->Stderr();
    Start(port_);
  }

  std::unique_ptr<Store> Connected(uint32_t reconnect_ms) const {
    ConnectOptions options;
    options.reconnect_ms = reconnect_ms;
    options.shared_memory = GetParam() == Over::kUnixShared;
    auto client =
        Connect(GetParam() == Over::kTcp ? daemon_->tcp_address() : daemon_->address(), options);
    EXPECT_TRUE(client.ok()) << (client.ok() ? "" : client.error().message);
    return client.ok() ? *std::move(client) : nullptr;
  }

  bool PutReady(Store& store) const {
    const auto put = PutPrompt(store, prompt_, "interrupted");
    if (!put.ok()) return false;
    return store.WaitReady(put->prefix, {}).ok();
  }

  std::shared_ptr<Session> Attach(Store& store, const StepPolicy& policy) const {
    auto session =
        store.Attach({.model = prompt_.model.name, .tokens = prompt_.tokens, .policy = policy});
    EXPECT_TRUE(session.ok()) << (session.ok() ? "" : session.error().message);
    return session.ok() ? *session : nullptr;
  }

  static std::vector<float> Query(uint64_t salt) {
    std::mt19937_64 rng(salt);
    std::normal_distribution<float> normal;
    std::vector<float> q(kQHeads * kDim);
    for (float& x : q) x = normal(rng);
    return q;
  }
  struct Answer {
    std::vector<float> y = std::vector<float>(kQHeads * kDim), lse = std::vector<float>(kQHeads);
    bool operator==(const Answer&) const = default;
  };
  static Result<Answer> Step(Session& session, uint64_t i) {
    Answer answer;
    PREFIXD_TRY(
        session.Step(static_cast<uint32_t>(i % 2), Query(i), answer.y, answer.lse, nullptr));
    return answer;
  }

  DaemonDir dir_;
  Prompt prompt_;
  std::string port_;
  std::unique_ptr<DaemonProcess> daemon_;
  std::unique_ptr<Store> client_, reference_;
};

const std::vector<StepPolicy> kPolicies = {
    {.mode = StepMode::kFull},
    {.mode = StepMode::kAnchors},
    {.estimator = EstimatorKind::kMoment, .k = 24},
    {.estimator = EstimatorKind::kNone, .k = 24},
};

TEST_P(Interruptions, DecodersGoOnWithTheSameAnswers) {
  constexpr uint64_t kQueries = 16;
  std::vector<std::shared_ptr<Session>> sessions;
  std::vector<std::vector<Answer>> want;
  for (const StepPolicy& policy : kPolicies) {
    sessions.push_back(Attach(*client_, policy));
    const auto reference = Attach(*reference_, policy);
    ASSERT_TRUE(sessions.back() && reference);
    want.emplace_back();
    for (uint64_t i = 0; i < kQueries; ++i) {
      const auto mine = Step(*sessions.back(), i), theirs = Step(*reference, i);
      ASSERT_TRUE(mine.ok() && theirs.ok());
      ExpectNear(mine->y, theirs->y);
      ExpectNear(mine->lse, theirs->lse);
      want.back().push_back(*mine);
    }
  }
  // A thread for each session, which decodes while the daemon ends, again and again.
  std::atomic<bool> stop{false};
  std::atomic<uint64_t> steps{0}, failed{0}, wrong{0};
  std::vector<std::atomic<uint64_t>> of_session(sessions.size());
  std::string why;  // the first failure
  std::vector<std::thread> threads;
  for (size_t s = 0; s < sessions.size(); ++s) {
    threads.emplace_back([&, s] {
      for (uint64_t i = 0; !stop; ++i) {
        const auto answer = Step(*sessions[s], i % kQueries);
        if (!answer.ok() && failed++ == 0) why = answer.error().message;
        wrong += answer.ok() && *answer != want[s][i % kQueries];
        ++steps, ++of_session[s];
      }
    });
  }
  for (int round = 0; round < 4; ++round) {
    const uint64_t before = steps;
    while (steps < before + 40) std::this_thread::yield();
    round % 2 == 0 ? Restart() : RestartInOrder();
  }
  // Each has found the daemon again when its second step after the last restart has ended.
  for (auto& own : of_session) {
    const uint64_t before = own;
    while (own < before + 10) std::this_thread::yield();
  }
  stop = true;
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(failed, 0u) << why;
  EXPECT_EQ(wrong, 0u);
  EXPECT_EQ(client_->Stats()->sessions, sessions.size());
}

// Every call of a session may be the first after the restart.
TEST_P(Interruptions, EveryCallFindsTheDaemonAgain) {
  const auto session = Attach(*client_, kPolicies[2]),
             reference = Attach(*reference_, kPolicies[2]);
  ASSERT_TRUE(session && reference);
  const size_t row = prompt_.model.geometry.row(0).bytes();
  const std::vector<uint32_t> ids = {3, 77, 399};
  using Call = std::function<Result<std::vector<std::byte>>(Session&)>;
  const auto bytes = [](const auto& values) {
    const auto view = std::as_bytes(std::span(values));
    return std::vector<std::byte>(view.begin(), view.end());
  };
  const std::vector<std::pair<std::string, Call>> calls = {
      {"rows",
       [&](Session& s) -> Result<std::vector<std::byte>> {
         std::vector<std::byte> out(ids.size() * row);
         PREFIXD_TRY(s.ReadRows(1, 1, ids, out));
         return out;
       }},
      {"range",
       [&](Session& s) -> Result<std::vector<std::byte>> {
         std::vector<std::byte> out(kTokens * row);
         PREFIXD_TRY(s.ReadRange(0, 1, {0, kTokens}, out));
         return out;
       }},
      {"layer",
       [&](Session& s) -> Result<std::vector<std::byte>> {
         std::vector<std::byte> k(kTokens * row), v(k);  // of two heads
         PREFIXD_TRY(s.ReadLayer({1, {0, kTokens}}, k, v));
         return v;
       }},
      {"tokens",
       [&](Session& s) -> Result<std::vector<std::byte>> {
         std::vector<uint32_t> out(kTokens);
         PREFIXD_TRY(s.ReadTokens({0, kTokens}, out));
         return bytes(out);
       }},
      {"select",
       [&](Session& s) -> Result<std::vector<std::byte>> {
         PREFIXD_ASSIGN(const auto found, s.Select(0, 0, std::vector<float>(2 * kDim, 0.5f), 9));
         return bytes(found.ids);
       }},
      {"summary", [](Session& s) { return s.MomentBytes(1, 0); }},
      {"policy",
       [](Session& s) -> Result<std::vector<std::byte>> {
         PREFIXD_TRY(s.SetPolicy({.k = 31}));
         return std::vector<std::byte>(s.policy().k.value_or(0));
       }},
  };
  for (const auto& [name, call] : calls) {
    SCOPED_TRACE(name);
    Restart();
    const auto mine = call(*session), theirs = call(*reference);
    ASSERT_TRUE(theirs.ok()) << theirs.error().message;
    ASSERT_TRUE(mine.ok()) << mine.error().message;
    EXPECT_EQ(*mine, *theirs);
  }
  // The policy set last holds after the next restart, and a batch finds the daemon, too.
  Restart();
  const auto q = Query(5);
  std::vector<Answer> answers(2);
  std::vector<StepInfo> infos(2);
  std::vector<StepRequest> batch;
  for (size_t i = 0; i < 2; ++i) {
    batch.push_back({session.get(), uint32_t(i), q, answers[i].y, answers[i].lse, &infos[i], {}});
  }
  client_->StepBatch(batch);
  for (size_t i = 0; i < 2; ++i) {
    ASSERT_TRUE(batch[i].status.ok()) << batch[i].status.error().message;
    EXPECT_EQ(infos[i].k, 31u);
  }
  if (GetParam() != Over::kTcp) {
    Restart();
    const auto rows = session->ReadInPlace(0, 0, ids);
    ASSERT_TRUE(rows.ok()) << rows.error().message;
    EXPECT_EQ(rows->rows.size(), ids.size());
  }
  Restart();
  EXPECT_EQ(client_->Match({.model = prompt_.model.name, .tokens = prompt_.tokens})->n_tokens,
            kTokens);
  EXPECT_TRUE(Attach(*client_, kPolicies[0]));
}

// Matches have connections of their own: one that is asked while the daemon is away waits for it,
// and so does one that has no connection left to use, whatever the main connection knows.
TEST_P(Interruptions, AsynchronousMatchesFindTheDaemonAgain) {
  const MatchSpec spec{.model = prompt_.model.name, .tokens = prompt_.tokens};
  const auto found = [&](Result<std::unique_ptr<PendingMatch>> pending) -> uint32_t {
    if (!pending.ok()) return ADD_FAILURE() << pending.error().message, 0u;
    const auto match = (*pending)->Get();
    EXPECT_TRUE(match.ok()) << match.error().message;
    return match.ok() ? match->n_tokens : 0;
  };
  const auto patience = std::chrono::minutes(1);
  for (int round = 0; round < 3; ++round) {
    SCOPED_TRACE(round);
    EXPECT_EQ(found(client_->MatchAsync(spec, patience)), kTokens);  // makes the connection
    Restart();
    EXPECT_EQ(found(client_->MatchAsync(spec, patience)), kTokens);
    Kill();
    auto pending = client_->MatchAsync(spec, patience);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    Start(port_);
    EXPECT_EQ(found(std::move(pending)), kTokens);
  }
  // Two at once: each has its own connection.
  Restart();
  MatchSpec shorter = spec;
  shorter.tokens.resize(kTokens / 2);
  auto one = client_->MatchAsync(spec, patience), two = client_->MatchAsync(shorter, patience);
  EXPECT_EQ(found(std::move(one)), kTokens);
  EXPECT_EQ(found(std::move(two)), kTokens / 2);
  // Who may not wait is told.
  auto hasty = Connected(0);
  EXPECT_EQ(found(hasty->MatchAsync(spec, patience)), kTokens);
  Kill();
  auto failed = hasty->MatchAsync(spec, patience);
  ASSERT_TRUE(failed.ok());
  EXPECT_EQ((*failed)->Get().error().code, Code::kUnavailable);
  // Each waits as long as it may, however long ago another waited in vain.
  Start(port_);
  const auto waits = Connected(3000);
  Kill();
  failed = waits->MatchAsync(spec, patience);
  ASSERT_TRUE(failed.ok());
  EXPECT_EQ((*failed)->Get().error().code, Code::kUnavailable);
  auto late = waits->MatchAsync(spec, patience);
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  Start(port_);
  EXPECT_EQ(found(std::move(late)), kTokens);
}

TEST_P(Interruptions, WhoMayNotWaitIsToldAtOnce) {
  auto client = Connected(0);
  const auto session = Attach(*client, kPolicies[0]);
  ASSERT_TRUE(session);
  Kill();
  for (int i = 0; i < 2; ++i) {
    const auto answer = Step(*session, 1);
    ASSERT_FALSE(answer.ok());
    EXPECT_EQ(answer.error().code, Code::kUnavailable) << answer.error().message;
  }
  EXPECT_EQ(EveryPrefix(*client).error().code, Code::kUnavailable);
  Start(port_);
  EXPECT_EQ(Step(*session, 1).error().code, Code::kUnavailable);  // this session has ended
  EXPECT_TRUE(Attach(*client, kPolicies[0]));
}

TEST_P(Interruptions, ADaemonThatStaysAwayIsUnavailable) {
  auto client = Connected(300);
  const auto session = Attach(*client, kPolicies[0]);
  ASSERT_TRUE(session);
  Kill();
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(Step(*session, 1).error().code, Code::kUnavailable);
    EXPECT_EQ(EveryModel(*client).error().code, Code::kUnavailable);
  }
  Start(port_);  // when it comes back late, the session goes on all the same
  const auto answer = Step(*session, 1);
  EXPECT_TRUE(answer.ok()) << answer.error().message;
}

// A session never goes on over another prefix.
TEST_P(Interruptions, APrefixThatIsGoneEndsTheSession) {
  const auto session = Attach(*client_, kPolicies[0]);
  ASSERT_TRUE(session);
  const std::string prefix = session->info().prefix;
  Restart();
  const Status removed = Connected(0)->Remove(prefix);
  ASSERT_TRUE(removed.ok()) << removed.error().ToString();
  for (int i = 0; i < 2; ++i) {
    const auto answer = Step(*session, 1);
    ASSERT_FALSE(answer.ok());
    EXPECT_EQ(answer.error().code, Code::kUnavailable);
    EXPECT_NE(answer.error().message.find("this session cannot go on: no prefix named"),
              std::string::npos)
        << answer.error().message;
    // Also when the same prompt is stored again, under another id.
    ASSERT_TRUE(PutReady(*client_));
  }
  EXPECT_TRUE(Attach(*client_, kPolicies[0]));
}

// Nor over what is left of its own, unasked.
TEST_P(Interruptions, APrefixThatWasCompressedEndsTheSession) {
  const StepPolicy policy{.estimator = EstimatorKind::kMoment, .k = 24};
  const auto session = Attach(*client_, policy);
  ASSERT_TRUE(session);
  const std::string prefix = session->info().prefix;
  EXPECT_FALSE(session->info().compressed);
  Restart();
  const auto other = Connected(0);
  ASSERT_TRUE(other);
  const auto compressed = other->Compress(prefix, {.keep = 0.5, .policy = "window"}, nullptr);
  ASSERT_TRUE(compressed.ok()) << compressed.error().ToString();
  const auto answer = Step(*session, 1);
  ASSERT_FALSE(answer.ok());
  EXPECT_EQ(answer.error().code, Code::kUnavailable);
  EXPECT_NE(answer.error().message.find("was compressed meanwhile"), std::string::npos)
      << answer.error().message;
  EXPECT_EQ(client_->Stats()->sessions, 0u);
}

TEST_P(Interruptions, AWaitForAnotherPutIsNoneForADaemonThatIsAway) {
  const auto client = Connected(0);
  ASSERT_TRUE(client);
  Kill();
  const auto begun = std::chrono::steady_clock::now();
  const auto put =
      client->BeginPut({.model = prompt_.model.name, .tokens = prompt_.tokens, .wait_ms = 60'000});
  ASSERT_FALSE(put.ok());
  EXPECT_EQ(put.error().code, Code::kUnavailable);
  EXPECT_LT(std::chrono::steady_clock::now() - begun, std::chrono::seconds(30));
}

// A refusal that the next call may not meet is told as it is.
TEST_P(Interruptions, ASessionThatFindsNoRoomGoesOnLater) {
  const auto session = Attach(*client_, kPolicies[0]);
  ASSERT_TRUE(session);
  Kill();
  Start(port_, {"--max-sessions", "1"});
  const auto other = Connected(0);
  ASSERT_TRUE(other);
  const auto last = Attach(*other, kPolicies[0]);
  ASSERT_TRUE(last);
  const auto refused = Step(*session, 1);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code, Code::kResourceExhausted) << refused.error().message;
  ASSERT_TRUE(last->Detach().ok());
  const auto answer = Step(*session, 1);
  EXPECT_TRUE(answer.ok()) << answer.error().message;
}

// A call that attaches again while the session is detached leaves nothing at the daemon.
TEST_P(Interruptions, WhatIsDetachedMeanwhileStaysDetached) {
  const auto session = Attach(*client_, kPolicies[0]);
  ASSERT_TRUE(session);
  Kill();
  auto step = std::async(std::launch::async, [&] { return Step(*session, 1); });
  EXPECT_EQ(step.wait_for(std::chrono::milliseconds(200)), std::future_status::timeout);
  (void)session->Detach();
  Start(port_);
  const auto answer = step.get();
  ASSERT_FALSE(answer.ok());
  EXPECT_EQ(answer.error().code, Code::kFailedPrecondition) << answer.error().message;
  EXPECT_EQ(client_->Stats()->sessions, 0u);
}

TEST_P(Interruptions, APutBeginsAgainAndWhatWasCommittedIsFound) {
  const Prompt other = MakePrompt(90, Seed("Interruptions.Put"));
  auto put = client_->BeginPut({other.model.name, "", other.tokens, ""});
  ASSERT_TRUE(put.ok() && (*put)->Write(0, 0, 90, other.k[0], other.v[0]).ok());
  Restart();
  EXPECT_EQ((*put)->Write(1, 0, 90, other.k[1], other.v[1]).error().code, Code::kUnavailable);
  EXPECT_EQ((*put)->Commit().error().code, Code::kUnavailable);
  EXPECT_EQ(client_->Match({.model = prompt_.model.name, .tokens = prompt_.tokens})->n_tokens,
            kTokens);
  EXPECT_EQ(client_->Match({.model = other.model.name, .tokens = other.tokens})->n_tokens, 0u);
  EXPECT_TRUE(PutPrompt(*client_, other).ok());
  Restart();
  EXPECT_EQ(client_->Match({.model = other.model.name, .tokens = other.tokens})->n_tokens, 90u);
}

std::string OverName(const ::testing::TestParamInfo<Over>& over) {
  constexpr const char* kNames[] = {"UnixShared", "UnixInline", "Tcp"};
  return kNames[size_t(over.param)];
}
INSTANTIATE_TEST_SUITE_P(Clients, Interruptions,
                         ::testing::Values(Over::kUnixShared, Over::kUnixInline, Over::kTcp),
                         OverName);

}  // namespace
}  // namespace prefixd::testing
