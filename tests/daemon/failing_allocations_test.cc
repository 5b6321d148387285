// Lets one allocation after the other fail on the daemon's threads while a client puts, attaches
// and steps: every call gets an answer or its connection ends, and the daemon serves on.
#include <future>
#include <random>

#include "base/every_page.h"
#include "daemon/calls/request_handler.h"
#include "daemon/http/collector.h"
#include "tests/daemon/connections/stepping_store.h"
#include "tests/daemon/daemon_in_process.h"
#include "tests/runtime/runtime_fixture.h"
#include "tests/support/failing_new.h"

namespace prefixd::testing {
namespace {

class DaemonMemoryTest : public RuntimeTest {
 protected:
  DaemonMemoryTest() {
    options_.recluster = false;
    options_.estimators = *ParseVariants("none, moment");
    policy_.k = 25;
    policy_.selector = "exact";
  }

  Status Put(Store& client, const SyntheticPrompt& prompt, std::string& prefix) {
    PREFIXD_ASSIGN(auto put, client.BeginPut({spec_.name, "", prompt.tokens, "test"}));
    for (uint32_t l = 0; put->missing().size() > 0 && l < spec_.geometry.n_layers; ++l) {
      const uint32_t n = prompt.n_tokens;
      PREFIXD_TRY(put->Write(l, 0, n, prompt.K(l, 0, n), prompt.V(l, 0, n)));
    }
    PREFIXD_ASSIGN(const PutResult result, put->Commit());
    prefix = result.prefix;
    return client.WaitReady(prefix, nullptr);
  }

  // Returns the first error of a client that comes, puts, matches, attaches, steps and leaves.
  Status Story(std::string& prefix) {
    ConnectOptions options;
    options.call_timeout_ms = 20000;  // a call that nobody answers fails the test
    PREFIXD_ASSIGN(auto client, RemoteStore::Connect("unix:" + daemon_->path(), options));
    PREFIXD_TRY(Put(*client, prompt_, prefix));
    PREFIXD_ASSIGN(const auto prefixes, EveryPrefix(*client));  // some kilobytes
    PREFIXD_ASSIGN(const auto match,
                   client->Match({.model = spec_.name, .tokens = prompt_.tokens}));
    PREFIXD_ASSIGN(const auto session,
                   client->Attach({spec_.name, "", prompt_.tokens, "", 0, policy_}));
    const KvGeometry& g = spec_.geometry;
    std::vector<float> y(g.n_q_heads * g.value_dim), lse(g.n_q_heads);
    for (uint32_t l = 0; l < g.n_layers; ++l) {
      PREFIXD_TRY(session->Step(l, prompt_.Q(l, prompt_.n_tokens - 1, 1), y, lse, nullptr));
    }
    PREFIXD_ASSIGN(const auto ledger, session->Detach());
    if (match.n_tokens == prompt_.n_tokens && prefixes.size() == 1 + kOthers) return {};
    return Error{Code::kInternal, "the prompt is not there"};
  }

  static constexpr size_t kOthers = 16;
  SyntheticPrompt prompt_;
  StepPolicy policy_;
  std::unique_ptr<daemon::DaemonInProcess> daemon_;
};

TEST_F(DaemonMemoryTest, TheDaemonServesOn) {
  const uint64_t seed = Seed("TheDaemonServesOn");
  prompt_ = MakePrompt(spec_.geometry, 200, seed);
  Open();
  daemon_ = std::make_unique<daemon::DaemonInProcess>(std::move(store_));
  std::mt19937_64 rng(seed);
  std::string prefix;
  for (uint64_t i = 0; i < kOthers; ++i) {
    ASSERT_OK(Put(*daemon_->Connect(), MakePrompt(spec_.geometry, 40, seed + 1 + i), prefix));
  }
  ASSERT_OK(Story(prefix));
  uint32_t hits = 0;
  // JSON is in every message, and Asio's coroutines end the process when they cannot wait: only
  // allocations larger than theirs can fail.
  for (int64_t n = 1;; n += 1 + static_cast<int64_t>(rng() % static_cast<uint64_t>(n / 8 + 1))) {
    SCOPED_TRACE("allocation " + std::to_string(n));
    ASSERT_OK(daemon_->Connect()->Remove(prefix));
    FailingNew::Arm(Victims::kOthers, n, 2048);
    const Status ended = Story(prefix);
    const bool failed = FailingNew::Disarm();
    if (!ended.ok()) {
      const Code code = ended.error().code;
      EXPECT_TRUE(code == Code::kResourceExhausted || code == Code::kUnavailable)
          << ended.error().ToString();
      EXPECT_EQ(ended.error().message.find("did not answer in time"), std::string::npos);
    }
    ASSERT_OK(Story(prefix));
    if (!failed) break;
    ++hits;
    // Connections that were given up have released what they held.
    const auto client = daemon_->Connect();
    for (int i = 0; i < 2000 && client->Server()->connections > 1; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    ASSERT_EQ(client->Server()->connections, 1u);
    ASSERT_EQ(client->Stats()->sessions, 0u);
  }
  EXPECT_GT(hits, 10u);
  std::printf("%u allocations failed\n", hits);
  EXPECT_EQ(daemon_->Stop(), 0);
}

// A thread that serves rings has nobody above it who would catch an exception.
TEST(FailingThreads, ARingsCallIsAnsweredAndNoted) {
  SteppingStore store(std::make_shared<SteppingStore::Control>());
  daemon::Watch watch;
  daemon::RequestHandler handler(store, {"tenant-of-a-ring", false, true}, {}, {.watch = &watch},
                                 [] { return wire::ServerStats{}; });
  std::vector<std::byte> slot(4096);  // no step: the call is refused as a whole
  daemon::StepScratch scratch{MemoryAccount()};
  uint64_t calls = 0;
  for (bool failed = true; failed; ++calls) {
    FailingNew::Arm(Victims::kCaller, static_cast<int64_t>(calls) + 1);
    const daemon::StepServed served = handler.StepInSlot(slot, scratch);
    failed = FailingNew::Disarm();
    EXPECT_FALSE(served.ok);
  }
  EXPECT_GT(calls, 3u);
  uint64_t noted = 0;
  for (const uint64_t n : watch.Take(std::nullopt).failed) noted += n;
  EXPECT_EQ(noted, calls);
}

TEST(FailingThreads, AnAnswerOverHttpIsMade) {
  const auto control = std::make_shared<SteppingStore::Control>();
  control->throws = true;
  SteppingStore store(control);
  const TempDir dir;
  const daemon::Watch watch;
  daemon::Collector collector(store, dir.path(), watch, [] { return wire::ServerStats{}; });
  int64_t n = 0;
  for (bool failed = true; failed;) {
    std::promise<unsigned> status;
    FailingNew::Arm(Victims::kOthers, ++n);
    ASSERT_TRUE(
        collector.Ask(daemon::Collector::What::kMetrics, {},
                      [&](const daemon::HttpAnswer& answer) { status.set_value(answer.status); }));
    EXPECT_EQ(status.get_future().get(), 503u);
    failed = FailingNew::Disarm();
  }
  EXPECT_GT(n, 1);
}

}  // namespace
}  // namespace prefixd::testing
