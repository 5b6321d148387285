// Tests how long the daemon waits for clients that leave puts idle or do not read answers.
#include <chrono>
#include <thread>

#include "base/every_page.h"
#include "client_lib/remote_store.h"
#include "tests/daemon/connections/connect.h"
#include "tests/daemon/connections/raw_client.h"
#include "tests/daemon/daemon_process.h"
#include "tests/daemon/put_prompt.h"
#include "tests/support/seed.h"
#include "tests/support/test.h"

namespace prefixd {
namespace {

using testing::ConnectTo;
using testing::DaemonDir;
using testing::DaemonProcess;
using testing::Eventually;
using testing::MakePrompt;
using testing::RawClient;
using wire::Json;
using wire::MessageType;

TEST(DaemonPatience, AForgottenPutGivesItsSpaceBack) {
  DaemonDir dir;
  DaemonProcess daemon(dir.path(), {"--put-idle", "5"});
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
  EXPECT_EQ(EveryPrefix(*other)->size(), 1u);
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
  RawClient deaf(daemon.address());
  ask_for_everything(deaf, 12);
  RawClient slow(daemon.address());
  ask_for_everything(slow, 12);
  for (int i = 0; i < 12; ++i) {  // in all longer than the limit, but no single pause is
    auto reply = slow.Receive();
    ASSERT_TRUE(reply.ok()) << i << ": " << reply.error().message;
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
  }
  EXPECT_TRUE(Eventually([&] { return client->Server()->connections == before + 1; }));
  EXPECT_EQ(client->Stats()->sessions, 1u);  // the deaf client's session ended with its connection
  EXPECT_TRUE(slow.Call(MessageType::kListPrefixes, Json::object()).ok());
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
  RawClient raw(daemon.address());
  ASSERT_TRUE(raw.Call(MessageType::kHello, {{"tenant", ""}, {"shared_memory", false}}).ok());
  ASSERT_TRUE(raw.Send(MessageType::kWaitReady, {{"prefix", stored->prefix}}, 7).ok());
  ASSERT_TRUE(raw.Send(MessageType::kListPrefixes, Json::object(), 7).ok());
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
