// The real daemon: start, stop, restart, kill -9, hostile neighbours.
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <fstream>
#include <random>
#include <thread>

#include "client_lib/remote_client.h"
#include "client_lib/socket.h"
#include "tests/daemon/daemon_process.h"
#include "tests/daemon/put_prompt.h"
#include "tests/support/seed.h"
#include "tests/support/test.h"

namespace prefixd {
namespace {

using testing::DaemonProcess;
using testing::Finished;
using testing::MakePrompt;
using testing::RunProgram;
using testing::TempDir;

std::unique_ptr<RemoteClient> ConnectTo(const DaemonProcess& daemon, ConnectOptions options = {}) {
  auto client = RemoteClient::Connect(daemon.address(), options);
  EXPECT_TRUE(client.ok()) << (client.ok() ? "" : client.error().message);
  return client.ok() ? *std::move(client) : nullptr;
}

std::vector<std::byte> Bytes(std::string_view text) {
  std::vector<std::byte> bytes(text.size());
  std::memcpy(bytes.data(), text.data(), text.size());
  return bytes;
}

Result<Socket> RawSocket(const DaemonProcess& daemon) {
  return Socket::Connect(*Address::Parse(daemon.address()),
                         Socket::Clock::now() + std::chrono::seconds(5));
}

Status SendRaw(Socket& socket, std::span<const std::byte> bytes) {
  return socket.Send(std::span(&bytes, 1), Socket::Clock::now() + std::chrono::seconds(5));
}

// Reads the daemon's last words: an error frame for the whole connection, then its end.
std::string LastWords(Socket& socket) {
  const auto deadline = Socket::Clock::now() + std::chrono::seconds(10);
  std::array<std::byte, wire::kHeaderBytes> bytes{};
  if (!socket.Receive(bytes, deadline).ok()) return "";
  auto header = wire::DecodeHeader(bytes, {});
  if (!header.ok() || header->type != wire::MessageType::kError) return "no error frame";
  std::vector<std::byte> control(header->control_bytes);
  if (!socket.Receive(control, deadline).ok()) return "";
  std::array<std::byte, 1> more;
  EXPECT_FALSE(socket.Receive(more, deadline).ok());  // closed after it
  return wire::ErrorFromJson(*wire::UnpackControl(control)).message;
}

TEST(Daemon, ReadyThenCleanStopThenRestartKeepsPrefixes) {
  TempDir dir;
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
    EXPECT_EQ(put->stored_tokens, signal == SIGTERM ? 200u : 0u);  // the second time it is there
    daemon.Signal(signal);
    EXPECT_EQ(daemon.Wait(), 0) << daemon.Stderr();
    EXPECT_NE(::stat(daemon.socket().c_str(), &st), 0);
    Status gone = client->Remove(put->prefix);
    ASSERT_FALSE(gone.ok());
    EXPECT_EQ(gone.error().code, Code::kUnavailable);
  }
}

// Whoever sees the socket can stop the daemon in order, ready or not.
TEST(Daemon, ASignalAsSoonAsTheSocketIsThereStopsItInOrder) {
  TempDir dir;
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
  TempDir dir;
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
  EXPECT_EQ(client->Prefixes()->size(), 3u);
  for (const auto& prompt : prompts) {
    AttachSpec spec;
    spec.model = prompt.model.name;
    spec.tokens = prompt.tokens;
    spec.policy.mode = StepMode::kFull;
    auto session = client->Attach(spec);
    ASSERT_TRUE(session.ok()) << session.error().message;
    const size_t row = prompt.model.geometry.row().bytes();
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

TEST(Daemon, ASecondOneIsRefused) {
  TempDir dir;
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
  EXPECT_TRUE(ConnectTo(first));  // unharmed
}

TEST(Daemon, StartErrorsAreOneLineAndNonZero) {
  TempDir dir;
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
           {{"--workers", "0"}, 2, "limits.workers must be from 1"},
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

TEST(Daemon, ADisconnectMidPutLeavesNothing) {
  TempDir dir;
  DaemonProcess daemon(dir.path());
  ASSERT_TRUE(daemon.ready()) << daemon.Stderr();
  const auto prompt = MakePrompt(100, testing::Seed("Daemon.Disconnect"));
  {
    auto client = ConnectTo(daemon);
    ASSERT_TRUE(client && client->RegisterModel(prompt.model).ok());
    // A process of its own, killed with its put open.
    const pid_t child = ::fork();
    if (child == 0) {
      auto own = RemoteClient::Connect(daemon.address(), {});
      auto put = (*own)->BeginPut({prompt.model.name, "", prompt.tokens, ""});
      const bool written = put.ok() && testing::WriteRows(**put, prompt).ok();
      ::_exit(written ? 0 : 1);  // without destructors: the connection just ends
    }
    int status = -1;
    ::waitpid(child, &status, 0);
    ASSERT_EQ(status, 0);
  }
  auto client = ConnectTo(daemon);
  ASSERT_TRUE(client);
  for (int i = 0; i < 500 && client->Stats()->puts_aborted == 0; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  EXPECT_EQ(client->Stats()->puts_aborted, 1u);
  EXPECT_TRUE(client->Prefixes()->empty());
  EXPECT_EQ(client->Match(prompt.model.name, "", prompt.tokens)->n_tokens, 0u);
}

TEST(Daemon, GarbageDisturbsNobody) {
  TempDir dir;
  DaemonProcess daemon(dir.path(), {"--max-frame-mib", "1"});
  ASSERT_TRUE(daemon.ready()) << daemon.Stderr();
  auto client = ConnectTo(daemon);
  ASSERT_TRUE(client);
  ASSERT_TRUE(testing::PutPrompt(*client, MakePrompt(100, 1)).ok());

  const auto frame = [](wire::FrameHeader h, std::vector<std::byte> control = {}) {
    if (h.control_bytes == 0) h.control_bytes = uint32_t(control.size());
    const auto header = wire::EncodeHeader(h);
    std::vector<std::byte> bytes(header.size() + control.size());
    std::ranges::copy(control, std::ranges::copy(header, bytes.begin()).out);
    return bytes;
  };
  wire::FrameHeader hello;
  hello.request_id = 1;
  wire::FrameHeader newer = hello, large = hello, large_control = hello, early = hello;
  newer.version = 9;
  large.payload_bytes = 1ull << 40;
  large_control.control_bytes = 0xffffffff;
  early.type = wire::MessageType::kModels;
  struct Case {
    std::vector<std::byte> bytes;
    std::string message;
  };
  for (const Case& c : std::vector<Case>{
           {Bytes("GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"), "not a prefixd frame"},
           {frame(newer), "protocol version 9"},
           {frame(large), "the limit is 0"},  // nobody is known yet
           {frame(large_control), "control part of 4294967295 bytes"},
           {frame(early), "the first message must be hello"},
           {frame(hello, std::vector<std::byte>(1000, std::byte{0x91})),
            "malformed control part"}}) {
    auto socket = RawSocket(daemon);
    ASSERT_TRUE(socket.ok());
    ASSERT_TRUE(SendRaw(*socket, c.bytes).ok());
    EXPECT_NE(LastWords(*socket).find(c.message), std::string::npos) << c.message;
  }
  std::mt19937_64 rng(testing::Seed("Daemon.Garbage"));
  for (int i = 0; i < 200; ++i) {  // valid frames with random damage, and truncated ones
    auto socket = RawSocket(daemon);
    ASSERT_TRUE(socket.ok());
    auto bytes =
        frame(hello, wire::PackControl({{"tenant", ""}, {"shared_memory", rng() % 2 == 0}}));
    const auto second = frame({1, wire::MessageType(rng() % 32), 2, 0, 0, 0});
    bytes.insert(bytes.end(), second.begin(), second.end());
    bytes[rng() % bytes.size()] ^= std::byte(1 + rng() % 255);
    (void)SendRaw(*socket, std::span(bytes).first(rng() % (bytes.size() + 1)));
  }
  EXPECT_EQ(client->Prefixes()->size(), 1u);  // the old connection is as it was
  EXPECT_GE(client->Server()->protocol_errors, 6u);
  daemon.Signal(SIGTERM);
  EXPECT_EQ(daemon.Wait(), 0) << daemon.Stderr();
}

// A prompt whose rows are all of one byte.
testing::Prompt PlainPrompt(uint32_t n_tokens, std::byte byte) {
  testing::Prompt prompt = MakePrompt(n_tokens, 1);
  for (auto* rows : {&prompt.k, &prompt.v}) {
    for (auto& layer : *rows) std::fill(layer.begin(), layer.end(), byte);
  }
  return prompt;
}

TEST(DaemonRowsInPlace, ATenantSeesItsOwnAndChangesNothing) {
  TempDir dir;
  DaemonProcess daemon(dir.path(), {"--host-tier-mib", "4"});
  ASSERT_TRUE(daemon.ready()) << daemon.Stderr();
  const std::array<std::byte, 2> bytes = {std::byte{0x11}, std::byte{0x22}};
  std::vector<std::unique_ptr<RemoteClient>> clients;
  std::vector<std::shared_ptr<Session>> sessions;
  constexpr uint32_t kTokens = 9000;  // of each: 2.2 MB
  for (size_t t = 0; t < 2; ++t) {
    ConnectOptions options;
    options.tenant = "tenant-" + std::to_string(t);
    clients.push_back(ConnectTo(daemon, options));
    const auto prompt = PlainPrompt(kTokens, bytes[t]);
    auto put = testing::PutPrompt(*clients[t], prompt);
    ASSERT_TRUE(put.ok()) << put.error().message;
    auto session = clients[t]->Attach(
        {.model = prompt.model.name, .tokens = prompt.tokens, .policy = {.mode = StepMode::kFull}});
    ASSERT_TRUE(session.ok()) << session.error().message;
    sessions.push_back(*session);
  }
  std::mt19937_64 rng(testing::Seed("DaemonRowsInPlace"));
  for (int round = 0; round < 40; ++round) {
    for (size_t t = 0; t < 2; ++t) {
      const auto begin = static_cast<uint32_t>(rng() % (kTokens - 700));
      std::vector<uint32_t> ids;
      for (uint32_t i = 0; i < 700; ++i) ids.push_back(begin + i);
      auto rows = sessions[t]->BorrowRows(rng() % 2, rng() % 2, ids);
      ASSERT_TRUE(rows.ok()) << rows.error().message;
      for (const RowRef& row : rows->rows) {
        ASSERT_EQ(row.key[0], bytes[t]);
        ASSERT_EQ(row.value[31], bytes[t]);
      }
      const auto whole = rows->region.bytes;
      ASSERT_EQ(std::find(whole.begin(), whole.end(), bytes[1 - t]), whole.end());
      void* page = const_cast<std::byte*>(whole.data());
      EXPECT_EQ(::mprotect(page, whole.size(), PROT_READ | PROT_WRITE), -1);
      EXPECT_EQ(errno, EACCES);
    }
  }
  ConnectOptions admin;
  admin.admin = true;
  auto stats = ConnectTo(daemon, admin)->Stats();
  ASSERT_TRUE(stats.ok());
  ASSERT_EQ(stats->host_tenants.size(), 2u);
  for (const auto& t : stats->host_tenants) {
    // How much is held now is not known: pages of a file that was just rewritten are let go of.
    EXPECT_LE(t.bytes, 4u << 20);
    EXPECT_GT(t.hits, 0u);
    EXPECT_EQ(t.pinned_bytes, 0u);
    EXPECT_EQ(t.share_bytes, 2u << 20);
  }
  EXPECT_EQ(stats->checksum_failures, 0u);
}

TEST(DaemonRowsInPlace, AKilledClientLetsGoOfThem) {
  TempDir dir;
  DaemonProcess daemon(dir.path());
  ASSERT_TRUE(daemon.ready()) << daemon.Stderr();
  const auto prompt = MakePrompt(300, testing::Seed("DaemonRowsInPlace.Killed"));
  auto client = ConnectTo(daemon);
  ASSERT_TRUE(client && testing::PutPrompt(*client, prompt).ok());
  std::array<int, 2> pipe{};
  ASSERT_EQ(::pipe(pipe.data()), 0);
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {  // holds rows until it is killed
    auto own = RemoteClient::Connect(daemon.address(), {});
    if (!own.ok()) ::_exit(2);
    auto session = (*own)->Attach(
        {.model = prompt.model.name, .tokens = prompt.tokens, .policy = {.mode = StepMode::kFull}});
    if (!session.ok()) ::_exit(3);
    const std::vector<uint32_t> ids = {1, 100, 299};
    const auto rows = (*session)->BorrowRows(0, 0, ids);
    const char good = rows.ok() ? 'y' : 'n';
    if (::write(pipe[1], &good, 1) != 1) ::_exit(4);
    while (true) ::pause();
  }
  char good = 0;
  EXPECT_EQ(::read(pipe[0], &good, 1), 1);
  EXPECT_EQ(good, 'y');
  EXPECT_GT(client->Stats()->host_tier_pinned, 0u);
  EXPECT_EQ(client->Stats()->sessions, 1u);
  ::kill(child, SIGKILL);
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFSIGNALED(status));
  uint64_t pinned = 1;
  for (int i = 0; i < 1000 && pinned > 0; ++i) {
    pinned = client->Stats()->host_tier_pinned;
    if (pinned > 0) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  EXPECT_EQ(pinned, 0u);
  EXPECT_EQ(client->Stats()->sessions, 0u);
  ::close(pipe[0]);
  ::close(pipe[1]);
}

TEST(Daemon, ConnectionsAreBoundedAndReleased) {
  TempDir dir;
  DaemonProcess daemon(dir.path(), {"--max-connections", "2"});
  ASSERT_TRUE(daemon.ready()) << daemon.Stderr();
  auto a = ConnectTo(daemon), b = ConnectTo(daemon);
  ASSERT_TRUE(a && b);
  auto third = RemoteClient::Connect(daemon.address(), {});
  ASSERT_FALSE(third.ok());
  EXPECT_EQ(third.error().code, Code::kResourceExhausted) << third.error().message;
  b.reset();
  Result<std::unique_ptr<RemoteClient>> next = third.error();
  for (int i = 0; i < 500 && !next.ok(); ++i) {
    next = RemoteClient::Connect(daemon.address(), {});
    if (!next.ok()) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  EXPECT_TRUE(next.ok());
}

TEST(Daemon, TcpAsksForTheTokenAndGrantsNoAdmin) {
  TempDir dir;
  std::ofstream(dir.path() / "token") << "0123456789abcdef-secret\n";
  DaemonProcess daemon(dir.path(),
                       {"--listen", "127.0.0.1:0", "--tcp-token-file", dir.path() / "token"});
  ASSERT_TRUE(daemon.ready()) << daemon.Stderr();
  ConnectOptions options;
  EXPECT_FALSE(RemoteClient::Connect(daemon.tcp_address(), options).ok());
  options.token = "0123456789abcdef-secreT";
  EXPECT_FALSE(RemoteClient::Connect(daemon.tcp_address(), options).ok());
  options.token = "0123456789abcdef-secret";
  EXPECT_TRUE(RemoteClient::Connect(daemon.tcp_address(), options).ok());
  options.admin = true;
  EXPECT_FALSE(RemoteClient::Connect(daemon.tcp_address(), options).ok());
  EXPECT_TRUE(RemoteClient::Connect(daemon.address(), options).ok());
}

TEST(Daemon, ManyThreadsManyConnections) {
  TempDir dir;
  DaemonProcess daemon(dir.path());
  ASSERT_TRUE(daemon.ready()) << daemon.Stderr();
  const auto prompt = MakePrompt(200, testing::Seed("Daemon.Threads"));
  auto shared = ConnectTo(daemon);
  ASSERT_TRUE(shared && testing::PutPrompt(*shared, prompt).ok());
  std::atomic<int> good{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 6; ++i) {
    threads.emplace_back([&, i] {
      std::unique_ptr<RemoteClient> own;
      if (i % 2) own = ConnectTo(daemon);  // others share one connection
      Client& client = own ? *own : *shared;
      auto session = client.Attach({.model = prompt.model.name,
                                    .tokens = prompt.tokens,
                                    .policy = {.mode = StepMode::kFull}});
      if (!session.ok()) return;
      std::vector<float> q(64, 0.5f), y(64), lse(4), first;
      for (int step = 0; step < 20; ++step) {
        if (!(*session)->Step(uint32_t(step % 2), q, y, lse, nullptr).ok()) return;
        if (step == 0) first = y;
        if (step % 2 == 0 && y != first) return;
      }
      ++good;
    });
  }
  for (auto& t : threads) t.join();
  EXPECT_EQ(good, 6);
}

}  // namespace
}  // namespace prefixd
