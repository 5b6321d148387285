// Tests that a child which fork() makes cannot use what its parent has opened, and that the parent
// does not notice the child.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <functional>
#include <future>

#include "tests/client_lib/client_scenario.h"

namespace prefixd::testing {
namespace {

using Fork = ClientScenario;

// Runs `body` in a child of this process. Returns its exit status, or the signal that ended it,
// negated; a child that hangs is ended.
int InChild(const std::function<bool()>& body) {
  std::fflush(nullptr);
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(60);
    ::_exit(body() ? 0 : 1);
  }
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  return WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
}

template <typename T>
bool Refused(const char* call, const Result<T>& result) {
  const bool refused = !result.ok() && result.error().code == Code::kFailedPrecondition &&
                       result.error().message.find("before fork()") != std::string::npos;
  if (!refused) {
    std::fprintf(stderr, "in a child, %s: %s\n", call,
                 result.ok() ? "went through" : result.error().message.c_str());
  }
  return refused;
}

TEST_P(Fork, AChildIsRefusedAndItsParentGoesOn) {
  Put(*client_);
  auto session = Attach(*client_), steps = Attach(*client_);
  const auto theirs = Attach(*reference_);
  ASSERT_TRUE(session && steps && theirs);
  const Prompt other = MakePrompt(100, Seed("Fork"));
  PutSpec spec{.model = prompt_.model.name, .tokens = other.tokens};
  auto put = client_->BeginPut(spec);
  ASSERT_TRUE(put.ok()) << put.error().message;
  const MatchSpec match{.model = prompt_.model.name, .tokens = prompt_.tokens};
  // Its threads are not in the child.
  const auto early = client_->MatchAsync(match, std::chrono::minutes(1));
  ASSERT_TRUE(early.ok() && (*early)->Get().ok());
  RestoreOptions all;
  auto restore = Restore::Begin(session, all);
  ASSERT_TRUE(restore.ok()) << restore.error().message;

  const auto q = Queries(1, 3);
  std::vector<float> y(kQHeads * kDim), lse(kQHeads), want(kQHeads * kDim), want_lse(kQHeads);
  ASSERT_TRUE(theirs->Step(0, q, want, want_lse, nullptr).ok());
  // Steps of the parent go on meanwhile, over the same connection.
  std::atomic<bool> stop{false};
  std::atomic<int> done{0};
  auto stepping = std::async(std::launch::async, [&]() -> Status {
    std::vector<float> mine(kQHeads * kDim), mine_lse(kQHeads);
    while (!stop || done == 0) {
      PREFIXD_TRY(steps->Step(0, q, mine, mine_lse, nullptr));
      for (size_t i = 0; i < mine.size(); ++i) {
        if (std::abs(mine[i] - want[i]) > 1e-4) return InvalidArgument("another's answer");
      }
      ++done;
    }
    return {};
  });
  while (done == 0 &&
         stepping.wait_for(std::chrono::milliseconds(1)) != std::future_status::ready) {
  }
  const int child = InChild([&] {
    bool refused = true;
    for (int i = 0; i < 50; ++i) {
      refused = Refused("Step", session->Step(0, q, y, lse, nullptr)) && refused;
    }
    const std::vector<std::byte> row(2 * kDim * 2);
    refused = Refused("Append", session->Append(0, 1, row, row)) && refused;
    refused = Refused("AttendExact", session->AttendExact(0, 1, q, y, lse)) && refused;
    refused = Refused("Truncate", session->Truncate(0)) && refused;
    refused = Refused("Fork", session->Fork()) && refused;
    refused = Refused("report", session->report()) && refused;
    refused = Refused("Detach", session->Detach()) && refused;
    refused = Refused("Next", (*restore)->Next()) && refused;
    refused = Refused("Match", client_->Match(match)) && refused;
    refused = Refused("MatchAsync", client_->MatchAsync(match, std::chrono::seconds(1))) && refused;
    refused = Refused("Attach", client_->Attach({.model = match.model, .tokens = match.tokens})) &&
              refused;
    refused = Refused("BeginPut", client_->BeginPut(spec)) && refused;
    refused = Refused("WaitReady", client_->WaitReady(prefix_, {})) && refused;
    refused = Refused("Stats", client_->Stats()) && refused;
    refused = Refused("Commit", (*put)->Commit()) && refused;
    // Their ends reach neither the daemon nor the parent's files. The restore's thread is not here.
    static_cast<void>(restore->release());
    session.reset();
    put->reset();
    client_.reset();
    return refused;
  });
  EXPECT_EQ(child, 0);
  stop = true;
  const Status stepped = stepping.get();
  EXPECT_TRUE(stepped.ok()) << stepped.error().message;
  ASSERT_TRUE(session->Step(0, q, y, lse, nullptr).ok());
  ExpectNear(y, want);
  ExpectNear(lse, want_lse);
  ASSERT_TRUE(WriteRows(**put, other).ok());
  const auto written = (*put)->Commit();
  ASSERT_TRUE(written.ok()) << written.error().message;
  EXPECT_EQ(written->stored_tokens, other.tokens.size());
  EXPECT_TRUE((*restore)->Next().ok());
  EXPECT_EQ(session->Detach()->total.steps, 2u);  // of both KV heads, the parent's step alone
  // What the child opens itself is its own.
  if (!daemon_) return;
  EXPECT_EQ(InChild([&] {
              ConnectOptions options;
              options.shared_memory = GetParam() != Kind::kUnixInline;
              const auto own = Connect(daemon_->address(), options);
              return own.ok() && (*own)->Match(match).ok();
            }),
            0);
}

INSTANTIATE_TEST_SUITE_P(Clients, Fork, EveryKind(), KindName);

}  // namespace
}  // namespace prefixd::testing
