// Tests that peers who say nothing, or hardly anything, take nothing from others.
#include <algorithm>
#include <array>
#include <cstring>
#include <fstream>
#include <sstream>
#include <thread>

#include "client_lib/remote_store.h"
#include "protocol/socket.h"
#include "tests/daemon/connections/connect.h"
#include "tests/daemon/daemon_process.h"
#include "tests/daemon/put_prompt.h"
#include "tests/support/test.h"

namespace prefixd {
namespace {

using testing::ConnectTo;
using testing::DaemonDir;
using testing::DaemonProcess;

Socket::Deadline Soon() { return Socket::Clock::now() + std::chrono::seconds(30); }

Result<Socket> Raw(const std::string& address) {
  return Socket::Connect(*Address::Parse(address), Soon());
}

std::vector<std::byte> Frame(wire::MessageType type, const wire::Json& control,
                             uint64_t payload_bytes = 0) {
  const auto packed = wire::PackControl(control);
  wire::FrameHeader header;
  header.type = type;
  header.request_id = 1;
  header.control_bytes = uint32_t(packed.size());
  header.payload_bytes = payload_bytes;
  const auto head = wire::EncodeHeader(header);
  std::vector<std::byte> bytes(head.size() + packed.size());
  std::ranges::copy(packed, std::ranges::copy(head, bytes.begin()).out);
  return bytes;
}

Status SendAll(Socket& socket, std::span<const std::byte> bytes) {
  return socket.Send(std::span(&bytes, 1), Soon());
}

// Reads one answer and drops it.
Status ReceiveAny(Socket& socket) {
  std::array<std::byte, wire::kHeaderBytes> bytes{};
  PREFIXD_TRY(socket.Receive(bytes, Soon()));
  PREFIXD_ASSIGN(const auto header,
                 wire::DecodeHeader(bytes, {wire::kMaxReplyControlBytes, wire::kMaxPayloadBytes}));
  std::vector<std::byte> rest(header.control_bytes + header.payload_bytes);
  return socket.Receive(rest, Soon());
}

// Waits until the daemon has closed the connection; false: it is still open at the end.
bool Closed(Socket& socket) {
  const auto end = Soon();
  std::array<std::byte, 1> byte;
  while (socket.Receive(byte, end).ok()) {
  }
  return Socket::Clock::now() < end;
}

// Clients that are gone have their places until the daemon has released them.
Result<std::unique_ptr<RemoteStore>> ConnectInTime(const std::string& address) {
  auto client = RemoteStore::Connect(address, {});
  for (int i = 0; i < 1000 && !client.ok(); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    client = RemoteStore::Connect(address, {});
  }
  return client;
}

TEST(DaemonLimits, SilentTcpPeersKeepNobodyOut) {
  DaemonDir dir;
  DaemonProcess daemon(dir.path(), {"--listen", "127.0.0.1:0", "--max-connections", "8",
                                    "--max-silent-connections", "2", "--hello-timeout", "3600"});
  ASSERT_TRUE(daemon.ready()) << daemon.Stderr();
  std::vector<Socket> silent;
  for (int i = 0; i < 40; ++i) {
    auto socket = Raw(daemon.tcp_address());
    ASSERT_TRUE(socket.ok()) << socket.error().message;
    silent.push_back(*std::move(socket));
    auto local = ConnectInTime(daemon.address());
    ASSERT_TRUE(local.ok()) << i << ": " << local.error().message;
  }
  // The first silent ones made room, and so another remote client gets in.
  EXPECT_TRUE(Closed(silent.front()));
  const auto remote = ConnectInTime(daemon.tcp_address());
  ASSERT_TRUE(remote.ok()) << remote.error().message;
  auto local = ConnectInTime(daemon.address());
  ASSERT_TRUE(local.ok()) << local.error().message;
  EXPECT_GT((*local)->Server()->connections_silent_closed, 30u);
}

TEST(DaemonLimits, AMessageThatNeverEndsIsCutOffAndAnIdleClientIsNot) {
  DaemonDir dir;
  DaemonProcess daemon(dir.path(), {"--frame-timeout", "2"});
  ASSERT_TRUE(daemon.ready()) << daemon.Stderr();
  const auto hello = Frame(wire::MessageType::kHello, {{"tenant", ""}});
  const auto stats = Frame(wire::MessageType::kStats, wire::Json::object());
  auto idle = Raw(daemon.address());
  ASSERT_TRUE(idle.ok() && SendAll(*idle, hello).ok() && ReceiveAny(*idle).ok());
  // Cut off within the header, the control part, and the payload.
  const auto match = Frame(wire::MessageType::kMatch, {{"match", {{"model", "m"}}}}, 4096);
  for (const size_t sent : {size_t{7}, size_t{wire::kHeaderBytes + 3}, match.size()}) {
    auto slow = Raw(daemon.address());
    ASSERT_TRUE(slow.ok() && SendAll(*slow, hello).ok() && ReceiveAny(*slow).ok());
    ASSERT_TRUE(SendAll(*slow, std::span(match).first(sent)).ok());
    EXPECT_TRUE(Closed(*slow)) << sent;
  }
  EXPECT_TRUE(SendAll(*idle, stats).ok());
  EXPECT_TRUE(ReceiveAny(*idle).ok());  // it was silent for longer, between messages
}

TEST(DaemonLimits, ALargeHelloOrCancelIsNotUnpacked) {
  DaemonDir dir;
  DaemonProcess daemon(dir.path());
  ASSERT_TRUE(daemon.ready()) << daemon.Stderr();
  const std::string large(20 << 10, 'x');
  auto loud = Raw(daemon.address());
  ASSERT_TRUE(loud.ok());
  ASSERT_TRUE(
      SendAll(*loud, Frame(wire::MessageType::kHello, {{"tenant", ""}, {"client", large}})).ok());
  EXPECT_TRUE(Closed(*loud));
  auto canceller = Raw(daemon.address());
  ASSERT_TRUE(canceller.ok());
  ASSERT_TRUE(SendAll(*canceller, Frame(wire::MessageType::kHello, {{"tenant", ""}})).ok());
  ASSERT_TRUE(ReceiveAny(*canceller).ok());
  ASSERT_TRUE(
      SendAll(*canceller, Frame(wire::MessageType::kCancel, {{"request", 1}, {"x", large}})).ok());
  EXPECT_TRUE(Closed(*canceller));
}

TEST(DaemonLimits, TooFewDescriptorsAreSaidAtStart) {
  DaemonDir dir;
  const std::string program = PREFIXD_BINARY;
  const auto start = [&](const std::string& files) {
    return testing::RunProgram(
        "/bin/sh",
        {"-c", "ulimit -n " + files + "; exec timeout -s TERM 5 " + program + " --dir " +
                   (dir.path() / "store").string() + " --socket " + (dir.path() / "s").string()});
  };
  const auto refused = start("200");
  EXPECT_EQ(refused.code, 1);
  EXPECT_NE(refused.err.find("the process may open 200 files"), std::string::npos) << refused.err;
  const auto fewer = start("350");
  EXPECT_NE(fewer.err.find("connections at most instead of limits.max_connections = 256"),
            std::string::npos)
      << fewer.err;
}

TEST(DaemonLimits, NamesFromClientsBeginNoLineOfTheLog) {
  DaemonDir dir;
  DaemonProcess daemon(dir.path(), {"--log-level", "debug"});
  ASSERT_TRUE(daemon.ready()) << daemon.Stderr();
  ConnectOptions options;
  options.tenant =
      "a\nforged line\x1b[2J"
      "\xc2\x9b"
      "2J \xc3\x89";
  auto client = ConnectTo(daemon, options);
  ASSERT_TRUE(client);
  client.reset();
  daemon.Signal(SIGTERM);
  EXPECT_EQ(daemon.Wait(), 0);
  const std::string log = daemon.Stderr();
  EXPECT_NE(log.find("a\\x0aforged line\\x1b[2J\\xc2\\x9b2J \xc3\x89"), std::string::npos) << log;
  EXPECT_EQ(log.find("\nforged"), std::string::npos) << log;
}

TEST(DaemonLimits, RefusalsInALoopAreAFewLinesOfTheLog) {
  DaemonDir dir;
  DaemonProcess daemon(dir.path());
  ASSERT_TRUE(daemon.ready()) << daemon.Stderr();
  constexpr int kPeers = 300;
  for (int i = 0; i < kPeers; ++i) {
    auto peer = Raw(daemon.address());
    ASSERT_TRUE(peer.ok());
    const std::vector<std::byte> garbage(64, std::byte{'x'});
    ASSERT_TRUE(SendAll(*peer, garbage).ok());
    ASSERT_TRUE(Closed(*peer));
  }
  auto client = ConnectTo(daemon);
  ASSERT_TRUE(client);
  EXPECT_GE(client->Server()->protocol_errors, uint64_t{kPeers});
  std::istringstream log(daemon.Stderr());
  int lines = 0;
  for (std::string line; std::getline(log, line);) {
    lines += line.find("not a prefixd frame") != std::string::npos;
  }
  EXPECT_GT(lines, 0);
  EXPECT_LT(lines, kPeers / 2);  // a line every two seconds, however long the loop takes here
}

}  // namespace
}  // namespace prefixd
