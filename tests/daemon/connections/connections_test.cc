// Tests connections to the real daemon: cut off in the middle, garbage, too many, and many at once.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <random>
#include <thread>

#include "base/every_page.h"
#include "client_lib/remote_store.h"
#include "protocol/socket.h"
#include "tests/daemon/connections/connect.h"
#include "tests/daemon/daemon_process.h"
#include "tests/daemon/put_prompt.h"
#include "tests/protocol/requests.h"
#include "tests/support/seed.h"
#include "tests/support/test.h"

namespace prefixd {
namespace {

using testing::ConnectTo;
using testing::DaemonDir;
using testing::DaemonProcess;
using testing::MakePrompt;

std::vector<std::byte> Bytes(std::string_view text) {
  std::vector<std::byte> bytes(text.size());
  std::memcpy(bytes.data(), text.data(), text.size());
  return bytes;
}

Result<Socket> RawSocket(const DaemonProcess& daemon) {
  return Socket::Connect(*Address::Parse(daemon.address()),
                         Socket::Clock::now() + std::chrono::seconds(30));
}

Status SendRaw(Socket& socket, std::span<const std::byte> bytes) {
  return socket.Send(std::span(&bytes, 1), Socket::Clock::now() + std::chrono::seconds(30));
}

// Reads the error frame with which the daemon closes a connection, and returns its message.
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

TEST(Connections, ADisconnectMidPutLeavesNothing) {
  DaemonDir dir;
  DaemonProcess daemon(dir.path());
  ASSERT_TRUE(daemon.ready()) << daemon.Stderr();
  const auto prompt = MakePrompt(100, testing::Seed("Daemon.Disconnect"));
  {
    auto client = ConnectTo(daemon);
    ASSERT_TRUE(client && client->RegisterModel(prompt.model).ok());
    // The client is a process of its own, killed while its put is open.
    const pid_t child = ::fork();
    if (child == 0) {
      auto own = RemoteStore::Connect(daemon.address(), {});
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
  for (int i = 0; i < 2000 && client->Stats()->puts_aborted == 0; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  EXPECT_EQ(client->Stats()->puts_aborted, 1u);
  EXPECT_TRUE(EveryPrefix(*client)->empty());
  EXPECT_EQ(client->Match({.model = prompt.model.name, .tokens = prompt.tokens})->n_tokens, 0u);
}

TEST(Connections, GarbageDisturbsNobody) {
  DaemonDir dir;
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
  early.type = wire::MessageType::kListModels;
  struct Case {
    std::vector<std::byte> bytes;
    std::string message;
  };
  for (const Case& c : std::vector<Case>{
           {Bytes("GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"), "not a prefixd frame"},
           {frame(newer), "protocol version 9"},
           {frame(large), "the limit is 0"},  // before hello
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
  const std::vector<wire::MessageType> types = testing::AllRequests();
  for (size_t i = 0; i < 200; ++i) {  // valid frames with random damage, and truncated ones
    auto socket = RawSocket(daemon);
    ASSERT_TRUE(socket.ok());
    auto bytes =
        frame(hello, wire::PackControl({{"tenant", ""}, {"shared_memory", rng() % 2 == 0}}));
    const auto second = frame({1, types[i % types.size()], 2, 0, 0, 0});
    bytes.insert(bytes.end(), second.begin(), second.end());
    bytes[rng() % bytes.size()] ^= std::byte(1 + rng() % 255);
    (void)SendRaw(*socket, std::span(bytes).first(rng() % (bytes.size() + 1)));
  }
  EXPECT_EQ(EveryPrefix(*client)->size(), 1u);  // the old connection still works
  EXPECT_GE(client->Server()->protocol_errors, 6u);
  daemon.Signal(SIGTERM);
  EXPECT_EQ(daemon.Wait(), 0) << daemon.Stderr();
}

TEST(Connections, ConnectionsAreBoundedAndReleased) {
  DaemonDir dir;
  DaemonProcess daemon(dir.path(), {"--max-connections", "2", "--max-tenant-connections", "2"});
  ASSERT_TRUE(daemon.ready()) << daemon.Stderr();
  auto a = ConnectTo(daemon), b = ConnectTo(daemon);
  ASSERT_TRUE(a && b);
  auto third = RemoteStore::Connect(daemon.address(), {});
  ASSERT_FALSE(third.ok());
  EXPECT_EQ(third.error().code, Code::kResourceExhausted) << third.error().message;
  b.reset();
  Result<std::unique_ptr<RemoteStore>> next = third.error();
  for (int i = 0; i < 2000 && !next.ok(); ++i) {
    next = RemoteStore::Connect(daemon.address(), {});
    if (!next.ok()) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  EXPECT_TRUE(next.ok());
}

TEST(Connections, ManyThreadsManyConnections) {
  DaemonDir dir;
  DaemonProcess daemon(dir.path());
  ASSERT_TRUE(daemon.ready()) << daemon.Stderr();
  const auto prompt = MakePrompt(200, testing::Seed("Daemon.Threads"));
  auto shared = ConnectTo(daemon);
  ASSERT_TRUE(shared && testing::PutPrompt(*shared, prompt).ok());
  std::atomic<int> good{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 6; ++i) {
    threads.emplace_back([&, i] {
      std::unique_ptr<RemoteStore> own;
      if (i % 2) own = ConnectTo(daemon);  // others share one connection
      Store& client = own ? *own : *shared;
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
