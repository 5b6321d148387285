// Tests the life of the real daemon: start, stop, restart, kill -9, a second daemon, and startup
// errors.
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <fstream>
#include <thread>

#include "base/every_page.h"
#include "client_lib/remote_store.h"
#include "tests/daemon/connections/connect.h"
#include "tests/daemon/daemon_process.h"
#include "tests/daemon/put_prompt.h"
#include "tests/support/seed.h"
#include "tests/support/test.h"

namespace prefixd {
namespace {

using testing::ConnectTo;
using testing::DaemonDir;
using testing::DaemonProcess;
using testing::Finished;
using testing::MakePrompt;
using testing::RunProgram;

TEST(Daemon, ReadyThenCleanStopThenRestartKeepsPrefixes) {
  DaemonDir dir;
  const auto prompt = MakePrompt(200, testing::Seed("Daemon.Restart"));
  for (int signal : {SIGTERM, SIGINT}) {
    DaemonProcess daemon(dir.path());
    ASSERT_TRUE(daemon.ready()) << daemon.Stderr();
    EXPECT_EQ(daemon.ready_line(), "prefixd ready: unix:" + daemon.socket() + "\n");
    struct stat st {};
    ASSERT_EQ(::stat(daemon.socket().c_str(), &st), 0);
    EXPECT_EQ(st.st_mode & 0777, 0600u);
    auto client = ConnectTo(daemon);
    ASSERT_TRUE(client);
    auto put = testing::PutPrompt(*client, prompt);
    ASSERT_TRUE(put.ok()) << put.error().message;
    EXPECT_EQ(put->stored_tokens, signal == SIGTERM ? 200u : 0u);  // stored since the first round
    daemon.Signal(signal);
    EXPECT_EQ(daemon.Wait(), 0) << daemon.Stderr();
    EXPECT_NE(::stat(daemon.socket().c_str(), &st), 0);
    Status gone = client->Remove(put->prefix);
    ASSERT_FALSE(gone.ok());
    EXPECT_EQ(gone.error().code, Code::kUnavailable);
  }
}

// From the moment the socket exists, a signal stops the daemon in order, ready or not.
TEST(Daemon, ASignalAsSoonAsTheSocketIsThereStopsItInOrder) {
  DaemonDir dir;
  for (int round = 0; round < 10; ++round) {
    DaemonProcess daemon(dir.path(), {}, DaemonProcess::Await::kNothing);
    const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (::access(daemon.socket().c_str(), F_OK) != 0) {
      ASSERT_LT(std::chrono::steady_clock::now(), limit) << daemon.Stderr();
    }
    daemon.Signal(round % 2 ? SIGTERM : SIGINT);
    ASSERT_EQ(daemon.Wait(), 0) << daemon.Stderr();
    EXPECT_NE(::access(daemon.socket().c_str(), F_OK), 0);
  }
}

TEST(Daemon, KillNineKeepsWhatWasAcknowledged) {
  DaemonDir dir;
  const uint64_t seed = testing::Seed("Daemon.KillNine");
  std::vector<testing::Prompt> prompts;
  for (int i = 0; i < 3; ++i) {
    prompts.push_back(MakePrompt(150 + 10 * i, seed + i));
    DaemonProcess daemon(dir.path());  // over the stale socket of its predecessor
    ASSERT_TRUE(daemon.ready()) << daemon.Stderr();
    auto client = ConnectTo(daemon);
    ASSERT_TRUE(client);
    auto put = testing::PutPrompt(*client, prompts.back());
    ASSERT_TRUE(put.ok()) << put.error().message;
    auto half = client->BeginPut({prompts[0].model.name, "", std::vector<uint32_t>(64, 7u), ""});
    ASSERT_TRUE(half.ok());  // never committed
    daemon.Signal(SIGKILL);
    EXPECT_EQ(daemon.Wait(), 128 + SIGKILL);
  }
  DaemonProcess daemon(dir.path());
  ASSERT_TRUE(daemon.ready()) << daemon.Stderr();
  auto client = ConnectTo(daemon);
  ASSERT_TRUE(client);
  EXPECT_EQ(EveryPrefix(*client)->size(), 3u);
  for (const auto& prompt : prompts) {
    AttachSpec spec;
    spec.model = prompt.model.name;
    spec.tokens = prompt.tokens;
    spec.policy.mode = StepMode::kFull;
    auto session = client->Attach(spec);
    ASSERT_TRUE(session.ok()) << session.error().message;
    const size_t row = prompt.model.geometry.row(0).bytes();
    std::vector<std::byte> rows(prompt.tokens.size() * row);
    ASSERT_TRUE((*session)->ReadRange(1, 1, {0, uint32_t(prompt.tokens.size())}, rows).ok());
    for (size_t t = 0; t < prompt.tokens.size(); ++t) {
      ASSERT_EQ(std::memcmp(&rows[t * row], &prompt.k[1][(t * 2 + 1) * row / 2], row / 2), 0);
    }
  }
  auto verify = client->Verify("", {});
  ASSERT_TRUE(verify.ok());
  EXPECT_TRUE(verify->damaged.empty());
}

TEST(Daemon, AStartBringsBackIntoMemoryWhatWasUsedLast) {
  DaemonDir dir;
  const auto prompt = MakePrompt(3000, testing::Seed("Daemon.AStartBringsBack"));
  // Work in the background would read rows, too.
  const std::vector<std::string> as_it_comes = {"--recluster=false"};
  {
    DaemonProcess daemon(dir.path(), as_it_comes);
    ASSERT_TRUE(daemon.ready()) << daemon.Stderr();
    const auto client = ConnectTo(daemon);
    ASSERT_TRUE(client);
    const auto put = testing::PutPrompt(*client, prompt);
    ASSERT_TRUE(put.ok()) << put.error().message;
    ASSERT_TRUE(client->WaitReady(put->prefix, {}).ok());
    daemon.Signal(SIGTERM);
    EXPECT_EQ(daemon.Wait(), 0);
  }
  for (const bool warm : {true, false}) {
    std::vector<std::string> args = as_it_comes;
    if (!warm) args.emplace_back("--warm-up=false");
    DaemonProcess daemon(dir.path(), args);
    ASSERT_TRUE(daemon.ready()) << daemon.Stderr();
    const auto client = ConnectTo(daemon);
    ASSERT_TRUE(client);
    const auto warmed = [&] {
      const auto stats = client->Stats();
      return stats.ok() ? stats->warmed_bytes : UINT64_MAX;
    };
    const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    // All rows: two layers of two heads, 64 bytes each, the rest of their pages aside.
    while (warm && warmed() < 4u * 3000 * 64) {
      ASSERT_LT(std::chrono::steady_clock::now(), limit) << daemon.Stderr();
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    if (!warm) {
      std::this_thread::sleep_for(std::chrono::milliseconds(300));
      EXPECT_EQ(warmed(), 0u);
    }
    AttachSpec spec{.model = prompt.model.name, .tokens = prompt.tokens};
    spec.policy.mode = StepMode::kFull;
    const auto session = client->Attach(spec);
    ASSERT_TRUE(session.ok()) << session.error().message;
    std::vector<std::byte> k(3000 * 64), v(k.size());
    ASSERT_TRUE((*session)->ReadLayer({.layer = 1, .tokens = {0, 3000}}, k, v).ok());
    EXPECT_TRUE(k == prompt.k[1] && v == prompt.v[1]);
    const auto report = (*session)->Detach();
    ASSERT_TRUE(report.ok());
    const uint64_t from_disk = report->total.physical_bytes[static_cast<size_t>(Tier::kSsd)];
    EXPECT_EQ(from_disk == 0, warm) << from_disk;
  }
}

TEST(Daemon, ASecondOneIsRefused) {
  DaemonDir dir;
  DaemonProcess first(dir.path());
  ASSERT_TRUE(first.ready()) << first.Stderr();
  const Finished same_dir = RunProgram(PREFIXD_BINARY, {"--dir", dir.path() / "store", "--socket",
                                                        dir.path() / "s2", "--min-free-mib", "0"});
  EXPECT_EQ(same_dir.code, 1);
  EXPECT_NE(same_dir.err.find(std::to_string(first.pid())), std::string::npos) << same_dir.err;
  const Finished same_socket = RunProgram(
      PREFIXD_BINARY,
      {"--dir", dir.path() / "other", "--socket", first.socket(), "--min-free-mib", "0"});
  EXPECT_EQ(same_socket.code, 1);
  EXPECT_NE(same_socket.err.find("another daemon answers on"), std::string::npos);
  EXPECT_TRUE(ConnectTo(first));  // the first daemon still serves
}

TEST(Daemon, StartErrorsAreOneLineAndNonZero) {
  DaemonDir dir;
  const std::string store = dir.path() / "store", socket = dir.path() / "s";
  std::ofstream(dir.path() / "bad.toml") << "[store]\nhost_tear_mib = 5\n";
  std::ofstream(dir.path() / "file") << "no directory";
  DaemonProcess other(dir.path(), {"--listen", "127.0.0.1:0"});
  ASSERT_TRUE(other.ready()) << other.Stderr();
  const std::string port = other.tcp_address().substr(4);
  struct Case {
    std::vector<std::string> args;
    int code;
    std::string message;
  };
  for (const Case& c : std::vector<Case>{
           {{"--socket", std::string(120, 'x')}, 2, "socket path too long"},
           {{"--config", dir.path() / "bad.toml"},
            2,
            "bad.toml:2: unknown key 'store.host_tear_mib'"},
           {{"--config", dir.path() / "none.toml"}, 2, "cannot read the configuration file"},
           {{"--workers", "0"}, 2, "--workers must be from 1 to 1024 threads, not 0"},
           {{"--dir", dir.path() / "file", "--socket", socket + "2"}, 1, "file"},
           {{"--dir", store + "2", "--socket", dir.path() / "file"}, 1, "is no socket"},
           {{"--dir", store + "2", "--socket", "", "--listen", port}, 1, "cannot listen on"},
           {{"--dir", store + "2", "--socket", socket + "2", "--log-file", "/nonexistent/x"},
            1,
            "log.file"}}) {
    const Finished f = RunProgram(PREFIXD_BINARY, c.args);
    EXPECT_EQ(f.code, c.code) << c.message << "\n" << f.err;
    EXPECT_NE(f.err.find(c.message), std::string::npos) << c.message << "\n" << f.err;
    size_t lines = 0;
    for (std::string_view rest = f.err; !rest.empty();) {
      const std::string_view line = rest.substr(0, rest.find('\n'));
      lines += line.starts_with("prefixd: ");
      rest.remove_prefix(std::min(rest.size(), line.size() + 1));
    }
    EXPECT_EQ(lines, 1u) << f.err;
  }
  EXPECT_EQ(RunProgram(PREFIXD_BINARY, {"--no-such-flag"}).code, 2);
  EXPECT_EQ(RunProgram(PREFIXD_BINARY, {"--help"}).code, 0);
  EXPECT_NE(RunProgram(PREFIXD_BINARY, {"--version"}).out.find("prefixd "), std::string::npos);
  const Finished printed = RunProgram(PREFIXD_BINARY, {"--print-config"});
  EXPECT_EQ(printed.code, 0);
  std::ofstream(dir.path() / "printed.toml") << printed.out;
  const Finished again =
      RunProgram(PREFIXD_BINARY, {"--config", dir.path() / "printed.toml", "--print-config"});
  EXPECT_EQ(again.out, printed.out);
}

}  // namespace
}  // namespace prefixd
