// Tests how long the daemon waits for clients that leave puts idle or do not read answers.
#include <chrono>
#include <thread>

#include "client_lib/remote_store.h"
#include "protocol/socket.h"
#include "tests/daemon/connect.h"
#include "tests/daemon/daemon_process.h"
#include "tests/daemon/put_prompt.h"
#include "tests/support/seed.h"
#include "tests/support/test.h"

namespace prefixd {
namespace {

using testing::ConnectTo;
using testing::DaemonDir;
using testing::DaemonProcess;
using testing::MakePrompt;
using wire::Json;
using wire::MessageType;

// Waits until `done`, for at most 20 s.
bool Eventually(const std::function<bool()>& done) {
  for (int i = 0; i < 400; ++i) {
    if (done()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  return done();
}

// A connection that sends requests and reads an answer only when Receive is called.
class RawClient {
 public:
  explicit RawClient(const DaemonProcess& daemon)
      : socket_(*Socket::Connect(*Address::Parse(daemon.address()), Soon())) {}

  // id: the request's id; 0: the next free one.
  Status Send(MessageType type, const Json& control, uint64_t id = 0) {
    const auto packed = wire::PackControl(control);
    wire::FrameHeader header;
    header.type = type;
    header.request_id = id > 0 ? id : next_id_++;
    header.control_bytes = uint32_t(packed.size());
    const auto head = wire::EncodeHeader(header);
    const std::array<std::span<const std::byte>, 2> parts = {std::span(head), std::span(packed)};
    return socket_.Send(parts, Soon());
  }
  // Returns the control part of the next reply; its payload is read and dropped.
  Result<Json> Receive() {
    std::array<std::byte, wire::kHeaderBytes> bytes{};
    PREFIXD_TRY(socket_.Receive(bytes, Soon()));
    PREFIXD_ASSIGN(
        const wire::FrameHeader header,
        wire::DecodeHeader(bytes, {wire::kMaxReplyControlBytes, wire::kMaxPayloadBytes}));
    std::vector<std::byte> control(header.control_bytes), payload(header.payload_bytes);
    PREFIXD_TRY(socket_.Receive(control, Soon()));
    PREFIXD_TRY(socket_.Receive(payload, Soon()));
    PREFIXD_ASSIGN(Json json, wire::UnpackControl(control));
    if (header.type == MessageType::kProgress) return Receive();
    if (header.type == MessageType::kError) return wire::ErrorFromJson(json);
    return json;
  }
  Result<Json> Call(MessageType type, const Json& control) {
    PREFIXD_TRY(Send(type, control));
    return Receive();
  }

 private:
  static Socket::Deadline Soon() { return Socket::Clock::now() + std::chrono::seconds(20); }
  Socket socket_;
  uint64_t next_id_ = 1;
};

TEST(DaemonPatience, AForgottenPutGivesItsSpaceBack) {
  DaemonDir dir;
  DaemonProcess daemon(dir.path(), {"--put-idle", "1"});
  ASSERT_TRUE(daemon.ready()) << daemon.Stderr();
  const auto prompt = MakePrompt(100, testing::Seed("DaemonPatience.Put"));
  auto forgetful = ConnectTo(daemon), other = ConnectTo(daemon);
  ASSERT_TRUE(forgetful && other && other->RegisterModel(prompt.model).ok());
  auto put = forgetful->BeginPut({prompt.model.name, "", prompt.tokens, ""});
  ASSERT_TRUE(put.ok()) << put.error().message;
  ASSERT_TRUE(Eventually([&] { return other->Stats()->puts_aborted == 1; }));
  const Status late = testing::WriteRows(**put, prompt);
  ASSERT_FALSE(late.ok());
  EXPECT_EQ(late.error().code, Code::kNotFound);
  // The connection itself still works.
  EXPECT_TRUE(testing::PutPrompt(*forgetful, prompt).ok());
  EXPECT_EQ(other->Prefixes()->size(), 1u);
}

TEST(DaemonPatience, WhoDoesNotReadIsDisconnectedAndWhoReadsSlowlyIsNot) {
  DaemonDir dir;
  DaemonProcess daemon(dir.path(), {"--write-timeout", "3", "--max-frame-mib", "1"});
  ASSERT_TRUE(daemon.ready()) << daemon.Stderr();
  const auto prompt = MakePrompt(6000, testing::Seed("DaemonPatience.Read"));
  auto client = ConnectTo(daemon);
  ASSERT_TRUE(client);
  auto stored = testing::PutPrompt(*client, prompt);
  ASSERT_TRUE(stored.ok()) << stored.error().message;

  const auto ask_for_everything = [&](RawClient& raw, int times) {
    ASSERT_TRUE(raw.Call(MessageType::kHello, {{"tenant", ""}, {"shared_memory", false}}).ok());
    auto attached = raw.Call(MessageType::kAttach, {{"attach",
                                                     {{"model", prompt.model.name},
                                                      {"prefix", stored->prefix},
                                                      {"policy", {{"mode", "full"}}}}}});
    ASSERT_TRUE(attached.ok()) << attached.error().message;
    const Json rows = {{"session", (*attached)["session"]},
                       {"layer", 0},
                       {"kv_head", 0},
                       {"begin", 0},
                       {"end", 6000},
                       {"out", {{0, 6000 * 64}}}};
    for (int i = 0; i < times; ++i) ASSERT_TRUE(raw.Send(MessageType::kReadRange, rows).ok());
  };
  const uint64_t before = client->Server()->connections;
  RawClient deaf(daemon);
  ask_for_everything(deaf, 12);
  RawClient slow(daemon);
  ask_for_everything(slow, 12);
  for (int i = 0; i < 12; ++i) {  // in all longer than the limit, but no single pause is
    auto reply = slow.Receive();
    ASSERT_TRUE(reply.ok()) << i << ": " << reply.error().message;
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
  }
  EXPECT_TRUE(Eventually([&] { return client->Server()->connections == before + 1; }));
  EXPECT_EQ(client->Stats()->sessions, 1u);  // the deaf client's session ended with its connection
  EXPECT_TRUE(slow.Call(MessageType::kPrefixes, Json::object()).ok());
}

// A client may give several calls the same id; the daemon must still find each call to cancel, also
// at SIGTERM.
TEST(DaemonPatience, ALongCallIsCancelledThoughItsIdWasUsedAgain) {
  DaemonDir dir;
  DaemonProcess daemon(dir.path(), {"--build-ivf", "true", "--ivf-min-tokens", "1"});
  ASSERT_TRUE(daemon.ready()) << daemon.Stderr();
  auto client = ConnectTo(daemon);
  ASSERT_TRUE(client);
  // Ingest of this prompt takes many seconds.
  auto stored =
      testing::PutPrompt(*client, MakePrompt(30000, testing::Seed("DaemonPatience.Cancel")));
  ASSERT_TRUE(stored.ok()) << stored.error().message;
  RawClient raw(daemon);
  ASSERT_TRUE(raw.Call(MessageType::kHello, {{"tenant", ""}, {"shared_memory", false}}).ok());
  ASSERT_TRUE(raw.Send(MessageType::kWaitReady, {{"prefix", stored->prefix}}, 7).ok());
  ASSERT_TRUE(raw.Send(MessageType::kPrefixes, Json::object(), 7).ok());
  const auto prefixes = raw.Receive();
  ASSERT_TRUE(prefixes.ok());
  EXPECT_TRUE(prefixes->contains("prefixes"));
  ASSERT_TRUE(raw.Send(MessageType::kCancel, {{"request", 7}}).ok());
  const auto ended = raw.Receive();
  ASSERT_FALSE(ended.ok());
  EXPECT_EQ(ended.error().code, Code::kCancelled) << ended.error().message;
}

}  // namespace
}  // namespace prefixd
