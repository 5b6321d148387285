// What becomes of the calls of clients that cancel, are late or go away, as the daemon sees it.
#include "tests/daemon/calls/calls_fixture.h"

namespace prefixd::testing {
namespace {

using wire::Json;
using wire::MessageType;

class DeadClients : public CallsFixture {
 protected:
  void SetUp() override {
    OpenCold(MakePrompt(spec_.geometry, 400, Seed("DeadClients")));
    daemon::Config config;
    config.shutdown_grace_s = 1;
    memory_ = store_->memory();
    daemon_ = std::make_unique<daemon::DaemonInProcess>(std::move(store_), config);
    client_ = daemon_->Connect();
    ASSERT_TRUE(client_);
  }

  // Returns a client with a session, and the call that reads all rows of a head.
  std::unique_ptr<RawClient> NewClient(Json& read, bool shared = false) {
    auto raw = std::make_unique<RawClient>(daemon_->address());
    EXPECT_TRUE(raw->Call(MessageType::kHello, {{"tenant", ""}, {"shared_memory", shared}}).ok());
    const auto attached = raw->Call(
        MessageType::kAttach,
        {{"attach", {{"model", spec_.name}, {"prefix", prefix_}, {"policy", {{"mode", "full"}}}}}});
    EXPECT_TRUE(attached.ok()) << (attached.ok() ? "" : attached.error().message);
    if (!attached.ok()) return nullptr;
    const size_t bytes = prompt_.n_tokens * spec_.geometry.row(0).bytes();
    read = {{"session", (*attached)["session"]}, {"layer", 0},         {"kv_head", 0}, {"begin", 0},
            {"end", prompt_.n_tokens},           {"out", {{0, bytes}}}};
    return raw;
  }

  std::shared_ptr<MemoryBudget> memory_;
  std::unique_ptr<daemon::DaemonInProcess> daemon_;
  std::unique_ptr<RemoteStore> client_;
};

TEST_F(DeadClients, NothingRunsForThem) {
  Json read;
  auto raw = NewClient(read);
  ASSERT_TRUE(raw);
  HoldDisk();
  for (int i = 0; i < 64; ++i) ASSERT_OK(raw->Send(MessageType::kReadRange, read));
  plan_->AwaitInjected();
  ASSERT_TRUE(Eventually([&] { return client_->Server()->calls_waiting == 63; }));
  EXPECT_EQ(client_->Server()->calls_running, 2u);  // with the one that asks
  const uint64_t reads = plan_->counted;
  raw.reset();
  EXPECT_TRUE(Eventually([&] {
    const auto server = client_->Server();
    return server->calls_waiting == 0 && server->calls_running == 1 && server->connections == 1;
  }));
  EXPECT_EQ(client_->Server()->calls_dropped, 63u);
  EXPECT_EQ(client_->Stats()->sessions, 0u);
  Release();
  EXPECT_EQ(plan_->counted, reads);  // no other call began
}

// The reader waits for room among the payloads, and must see all the same that the client is gone.
TEST_F(DeadClients, AreSeenBehindPayloadsThatFindNoRoom) {
  Json read;
  auto raw = NewClient(read);
  ASSERT_TRUE(raw);
  HoldDisk();
  ASSERT_OK(raw->Send(MessageType::kReadRange, read));
  plan_->AwaitInjected();
  const std::vector<std::byte> payload(200u << 20);
  const auto large = std::async(std::launch::async, [&] {
    for (int i = 0; i < 2; ++i) {
      if (!raw->Send(MessageType::kReadTokens, Json::object(), 0, payload).ok()) return;
    }
  });
  ASSERT_TRUE(Eventually([&] { return client_->Server()->calls_waiting == 1; }));
  raw->Interrupt();
  EXPECT_TRUE(Eventually([&] {
    const auto server = client_->Server();
    return server->calls_running == 1 && server->connections == 1;
  }));
  large.wait();
}

// Refusals are answers, too: a client that reads none may not have them pile up.
TEST_F(DeadClients, WhoReadsNoRefusalIsDisconnected) {
  RawClient raw(daemon_->address());
  ASSERT_OK(raw.Call(MessageType::kHello, {{"tenant", ""}, {"shared_memory", false}}));
  const MemoryCharge all = memory_->Of("").Charge(MemoryKind::kMessages, uint64_t{1} << 40);
  const std::vector<std::byte> payload(128 << 10);
  int sent = 0;
  while (sent < 3000 && raw.Send(MessageType::kReadTokens, Json::object(), 0, payload).ok()) ++sent;
  EXPECT_LT(sent, 3000);
  EXPECT_TRUE(Eventually([&] { return client_->Server()->connections == 1; }));
}

// Nobody reads from a connection on which something else than the protocol came.
TEST_F(DeadClients, NothingRunsForWhoBreaksTheProtocol) {
  Json read;
  auto raw = NewClient(read);
  ASSERT_TRUE(raw);
  HoldDisk();
  for (int i = 0; i < 5; ++i) ASSERT_OK(raw->Send(MessageType::kReadRange, read));
  plan_->AwaitInjected();
  ASSERT_OK(raw->Send(MessageType::kReply, Json::object()));  // no request
  EXPECT_TRUE(Eventually([&] {
    const auto server = client_->Server();
    return server->calls_running == 1 && server->connections == 1;
  }));
  EXPECT_EQ(client_->Server()->calls_dropped, 4u);
  EXPECT_EQ(client_->Stats()->sessions, 0u);
}

// They would have all workers of their tenant.
TEST_F(DeadClients, FewLayersOfOneClientAreReadAtOnce) {
  Json read;
  const auto raw = NewClient(read, /*shared=*/true);
  ASSERT_TRUE(raw);
  ConnectOptions options;
  options.tenant = "other";
  const auto other = daemon_->Connect(options);
  ASSERT_TRUE(other);
  const KvGeometry& g = spec_.geometry;
  const size_t rows = size_t{prompt_.n_tokens} * g.n_kv_heads;
  const size_t k = rows * g.row(0).key_bytes(), v = rows * g.row(0).value_bytes();
  const auto layer = [&](size_t at) -> Json {  // `at`: its own part of the shared memory
    return {{"session", read["session"]},
            {"layer", 0},
            {"begin", 0},
            {"end", prompt_.n_tokens},
            {"first_head", 0},
            {"n_heads", 0},
            {"head_major", false},
            {"out", {{at, k}, {at + k, v}}}};
  };
  HoldDisk();
  raw->UseSharedMemory();
  for (size_t i = 0; i < 12; ++i) {
    ASSERT_OK(raw->Send(MessageType::kReadLayer, layer(i * (k + v))));
  }
  ASSERT_TRUE(Eventually([&] { return other->Server()->calls_waiting == 7; }));
  EXPECT_EQ(other->Server()->calls_running, 4u + 1 + 1);  // one in turn, and the one that asks
  Release();
  for (int i = 0; i < 12; ++i) EXPECT_OK(raw->Receive());
}

// A client goes away with a layer's pieces on their way and its last ones unanswered.
TEST_F(DeadClients, PutsEndWithPiecesOnTheirWay) {
  auto raw = std::make_unique<RawClient>(daemon_->address());
  ASSERT_OK(raw->Call(MessageType::kHello, {{"tenant", ""}, {"shared_memory", false}}));
  const SyntheticPrompt other = MakePrompt(spec_.geometry, 300, Seed("DeadClients.Put"));
  const auto tokens = std::as_bytes(std::span<const uint32_t>(other.tokens));
  ASSERT_OK(raw->Send(MessageType::kBeginPut,
                      {{"put", {{"model", spec_.name}}}, {"in", {{0, tokens.size()}}}}, 0, tokens));
  const auto begun = raw->Receive();
  ASSERT_OK(begun);
  for (uint32_t layer = 0; layer < 2; ++layer) {
    for (uint32_t piece = 0; piece < 3; ++piece) {
      const auto k = other.K(layer, 100 * piece, 100), v = other.V(layer, 100 * piece, 100);
      std::vector<std::byte> rows(k.begin(), k.end());
      rows.insert(rows.end(), v.begin(), v.end());
      ASSERT_OK(raw->Send(MessageType::kPutWrite,
                          {{"put", (*begun)["put"]},
                           {"layer", layer},
                           {"first", 100 * piece},
                           {"n", 100},
                           {"piece", piece},
                           {"in", {{0, k.size()}, {k.size(), v.size()}}}},
                          0, rows));
    }
  }
  raw.reset();
  EXPECT_TRUE(Eventually(
      [&] { return client_->Server()->connections == 1 && client_->Stats()->puts_aborted == 1; }));
  EXPECT_EQ(client_->Match({.model = spec_.name, .tokens = other.tokens})->n_tokens, 0u);
}

TEST_F(DeadClients, ACallThatWaitsCanBeCancelledToo) {
  Json read;
  auto raw = NewClient(read);
  ASSERT_TRUE(raw);
  HoldDisk();
  ASSERT_OK(raw->Send(MessageType::kReadRange, read, 7));
  ASSERT_OK(raw->Send(MessageType::kReadRange, read, 8));
  plan_->AwaitInjected();
  ASSERT_OK(raw->Send(MessageType::kCancel, {{"request", 8}}));
  EXPECT_CODE(raw->Receive(), Code::kCancelled);
  EXPECT_EQ(client_->Server()->calls_waiting, 0u);
  ASSERT_OK(raw->Send(MessageType::kCancel, {{"request", 7}}));
  EXPECT_CODE(raw->Receive(), Code::kCancelled);
  Release();
  ASSERT_OK(raw->Call(MessageType::kReadRange, read));
}

TEST_F(DeadClients, TheDaemonKeepsToTheDeadlineOfAMessage) {
  Json read;
  auto raw = NewClient(read);
  ASSERT_TRUE(raw);
  HoldDisk();
  read["deadline_ms"] = 50;
  EXPECT_CODE(raw->Call(MessageType::kReadRange, read), Code::kDeadlineExceeded);
  read["deadline_ms"] = "soon";
  EXPECT_CODE(raw->Call(MessageType::kReadRange, read), Code::kInvalidArgument);
  Release();
  read["deadline_ms"] = ~uint64_t{0};
  ASSERT_OK(raw->Call(MessageType::kReadRange, read));
  // What gives something back is carried out however late it is.
  Json detach = {{"session", read["session"]}, {"deadline_ms", 0}};
  ASSERT_OK(raw->Call(MessageType::kDetach, detach));
  EXPECT_EQ(client_->Stats()->sessions, 0u);
}

TEST_F(DeadClients, ADaemonThatStopsWaitsForNoDisk) {
  Json read;
  auto raw = NewClient(read);
  ASSERT_TRUE(raw);
  HoldDisk();
  ASSERT_OK(raw->Send(MessageType::kReadRange, read));
  ASSERT_OK(raw->Send(MessageType::kReadRange, read));
  plan_->AwaitInjected();
  EXPECT_EQ(daemon_->Stop(), 0);
  engine_ = nullptr;  // went with the store
}

}  // namespace
}  // namespace prefixd::testing
