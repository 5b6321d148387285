// Tests the structured log: its form, slow steps, and the ids of requests.
#include <signal.h>
#include <sys/resource.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <sstream>
#include <thread>
#include <vector>

#include "daemon/calls/message.h"
#include "daemon/process/log_event.h"
#include "daemon/process/logging.h"
#include "tests/daemon/connections/ring_fixture.h"
#include "tests/support/files.h"

namespace prefixd::testing {
namespace {

using daemon::LogEvent;
using daemon::LogLevel;
using nlohmann::json;

// The log of this process, set up once.
const std::string& LogFile() {
  static const TempDir dir;
  static const std::string file = [] {
    const std::string path = dir / "log";
    EXPECT_OK(daemon::SetUpLogging("debug", path, "json"));
    return path;
  }();
  return file;
}

// Every line is an object, or it is a failure.
std::vector<json> Lines() {
  std::vector<json> lines;
  std::istringstream in(ReadFile(LogFile()));
  for (std::string line; std::getline(in, line);) {
    lines.push_back(json::parse(line, nullptr, false));
    EXPECT_TRUE(lines.back().is_object()) << line;
  }
  return lines;
}
json LastWith(const std::string& message) {
  json found;
  for (json& line : Lines()) {
    if (line["message"].get<std::string>().starts_with(message)) found = std::move(line);
  }
  return found;
}

class LogTest : public RingTest {
 protected:
  void SetUp() override {
    LogFile();
    daemon::Config config;
    config.slow_step_ms = 20;
    Start(config);
  }
};

TEST_F(LogTest, WhatClientsNameStaysInItsMember) {
  const std::string evil = "a\"},{\"level\":\"x\"\n\x1b[2J\x7f\xc2\x9b\xff";
  LogEvent(LogLevel::kWarn, "an event", {{"tenant", evil}, {"n", 7}});
  const json line = LastWith("an event");
  EXPECT_EQ(line["level"], "warning");
  EXPECT_EQ(line["n"], 7);
  EXPECT_EQ(line["tenant"], "a\"},{\"level\":\"x\"\n\x1b[2J\x7f\xc2\x9b\xef\xbf\xbd");
  // A terminal that shows the file obeys none of it.
  const std::string raw = ReadFile(LogFile());
  EXPECT_TRUE(
      std::ranges::all_of(raw, [](char c) { return c == '\n' || (c >= 0x20 && c < 0x7f); }));
  EXPECT_EQ(line["time"].get<std::string>().size(), std::string("2026-01-02T03:04:05.678Z").size());
}

TEST_F(LogTest, SlowStepsSayWhoseTheyWereAndWhatTookTheTime) {
  const auto messages = daemon_->Connect({.shared_memory = false});
  for (RemoteStore* store : {client_.get(), messages.get()}) {
    const auto session = Attach(*store);
    control_->Hold();
    Status status;
    std::thread held = HeldStep(*session, &status);
    control_->AwaitHeld(1);
    std::this_thread::sleep_for(std::chrono::milliseconds(60));
    control_->Release();
    held.join();
    EXPECT_OK(status);
    const json line = LastWith("slow step");
    ASSERT_TRUE(line.is_object());
    EXPECT_EQ(line["session"], session->info().id);
    EXPECT_EQ(line["layer"], SteppingStore::kHeldLayer);
    EXPECT_EQ(line["steps"], 1);
    EXPECT_GE(line["ms"].get<double>(), 20);
    EXPECT_TRUE(line.contains("select_ms") && line.contains("read_ms") &&
                line.contains("compute_ms") && line.contains("prefix"));
    EXPECT_TRUE(line["request"].get<std::string>().starts_with("c"));
    // Steps that are quick are no news.
    const size_t before = Lines().size();
    EXPECT_OK(Step(*session, 0));
    EXPECT_EQ(Lines().size(), before);
  }
}

TEST_F(LogTest, CallsThatFailAreNamedByTheirRequest) {
  EXPECT_CODE(client_->SetLifetime("x", {}), Code::kFailedPrecondition);
  LogEvent(LogLevel::kInfo, "lines for debugging wait for one that matters", {});
  const json line = LastWith("a call failed");
  ASSERT_TRUE(line.is_object());
  EXPECT_EQ(line["call"], "set_lifetime");
  const std::string request = line["request"];
  EXPECT_TRUE(request.starts_with("c") && request.find('-') != std::string::npos) << request;
  const auto watch = client_->Watch();
  ASSERT_OK(watch);
  const json& failures = (*watch)["watch"]["failures"];
  ASSERT_GE(failures.size(), 1u);
  EXPECT_EQ(failures[0]["request"], request);
  EXPECT_EQ(failures[0]["call"], "set_lifetime");
}

// Clients may come in a loop, each of them without memory for what it shares with the daemon.
TEST_F(LogTest, ClientsThatFindNoMemoryAreAFewLines) {
  rlimit was{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &was), 0);
  const auto handler = ::signal(SIGXFSZ, SIG_IGN);
  const rlimit less{1 << 20, was.rlim_max};  // of a ring and a region, too
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &less), 0);
  for (int i = 0; i < 60; ++i) EXPECT_TRUE(daemon_->Connect());
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &was), 0);
  ::signal(SIGXFSZ, handler);
  LogEvent(LogLevel::kInfo, "the last line", {});
  const std::vector<json> lines = Lines();
  const auto n = std::ranges::count_if(lines, [](const json& line) {
    const std::string said = line["message"];
    return said.starts_with("no ring for a client") ||
           said.starts_with("no shared memory for a client");
  });
  EXPECT_GT(n, 0);
  EXPECT_LE(n, 30);  // twenty at once, and one in two seconds
}

TEST(RequestIdTest, FollowsWhatTheClientCallsIt) {
  EXPECT_EQ(daemon::RequestId(3, 17, {}), "c3-17");
  EXPECT_EQ(daemon::RequestId(3, 17, {{"trace", "chat-8"}}), "c3-17/chat-8");
  EXPECT_EQ(daemon::RequestId(3, 17, {{"trace", 5}}), "c3-17");
  EXPECT_EQ(daemon::RequestId(3, 17, {{"trace", std::string(1000, 'x')}}).size(),
            6 + daemon::kMaxTraceBytes);
}

}  // namespace
}  // namespace prefixd::testing
