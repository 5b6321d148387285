// Tests what requests may take, remove and see: models, pages, answers, puts and sessions of
// tenants.
#include <thread>

#include "daemon/calls/reply.h"
#include "daemon/limits/slots.h"
#include "tests/daemon/calls/request_fixture.h"
#include "tests/daemon/connections/stepping_store.h"

namespace prefixd::daemon {
namespace {

TEST_F(RequestHandlerTest, ModelsAreRemovedByTheDaemonsOwnUserAlone) {
  ModelSpec idle = prompt_.model;
  idle.name = "idle";
  ASSERT_TRUE(store_->RegisterModel(idle).ok());
  auto stranger = Handler({"", false, false});
  auto own = Handler({"", false, true});
  const Json named = {{"model", "idle"}};
  EXPECT_EQ(CodeOf(Ask(*stranger, MessageType::kRemoveModel, named)), Code::kFailedPrecondition);
  EXPECT_TRUE(store_->Model("idle").ok());
  EXPECT_FALSE(Ask(*own, MessageType::kRemoveModel, named).error);
  EXPECT_EQ(CodeOf(Ask(*own, MessageType::kRemoveModel, named)), Code::kNotFound);
  EXPECT_EQ(CodeOf(Ask(*own, MessageType::kModel, named)), Code::kNotFound);
  EXPECT_EQ(CodeOf(Ask(*own, MessageType::kRemoveModel, Json::object())), Code::kInvalidArgument);
}

// Neither what a page holds, nor where it ends, nor what comes behind tells of other tenants.
TEST_F(RequestHandlerTest, PagesTellNothingOfOtherTenants) {
  const std::string hers = Put("alice"), his = Put("bob");
  Put("carol");
  auto bob = Handler({"bob", false, true});
  const auto list = [&](RequestHandler& handler, Json spec) {
    return Ask(handler, MessageType::kListPrefixes, {{"list", std::move(spec)}});
  };
  const Response own = list(*bob, {{"limit", 1}});
  ASSERT_FALSE(own.error);
  ASSERT_EQ(own.control["prefixes"].size(), 1u);
  EXPECT_EQ(own.control["prefixes"][0]["id"], his);
  EXPECT_EQ(own.control["next"], "");  // carol's is behind it
  EXPECT_EQ(CodeOf(list(*bob, {{"tenant", "alice"}})), Code::kInvalidArgument);
  EXPECT_EQ(CodeOf(list(*bob, {{"after", hers + ":alice"}})), Code::kInvalidArgument);
  auto admin = Handler({"", true, true});
  const Response first = list(*admin, {{"limit", 2}});
  ASSERT_EQ(first.control["prefixes"].size(), 2u);
  const Response rest = list(*admin, {{"limit", 2}, {"after", first.control["next"]}});
  ASSERT_EQ(rest.control["prefixes"].size(), 1u);
  EXPECT_EQ(rest.control["prefixes"][0]["tenant"], "carol");
  EXPECT_EQ(list(*admin, {{"tenant", "bob"}}).control["prefixes"].size(), 1u);
}

TEST_F(RequestHandlerTest, AnswersThatNoFrameCarriesAreErrors) {
  const auto packed = [](Response response, uint64_t max_payload) {
    PackReply({}, wire::MessageType::kReport, max_payload, &response);
    return response;
  };
  Response small;
  small.control = {{"a", 1}};
  small.payload.resize(100);
  const Response good = packed(std::move(small), 100);
  EXPECT_FALSE(good.error);
  EXPECT_EQ(good.packed, wire::PackControl({{"a", 1}}));
  Response tensors;
  tensors.payload.resize(101);
  const Response refused = packed(std::move(tensors), 100);
  EXPECT_EQ(CodeOf(refused), Code::kResourceExhausted);
  EXPECT_TRUE(refused.payload.empty());
  Response list;
  list.control = {{"a", std::string(size_t{wire::kMaxReplyControlBytes} + 1, 'x')}};
  const Response page = packed(std::move(list), 100);
  ASSERT_EQ(CodeOf(page), Code::kResourceExhausted);
  EXPECT_NE(page.error->message.find("smaller page"), std::string::npos);
  EXPECT_TRUE(page.packed.empty());
  // Large ones take memory until they are sent.
  const auto memory = MemoryBudget::Create({.capacity = 1 << 20});
  Response large;
  large.control = {{"a", std::string(512 << 10, 'x')}};
  PackReply(memory->Of("t"), wire::MessageType::kReport, 100, &large);
  EXPECT_FALSE(large.error);
  EXPECT_GT(memory->used(MemoryKind::kMessages), 512u << 10);
  Response second;
  second.control = {{"a", std::string(900 << 10, 'x')}};
  PackReply(memory->Of("t"), wire::MessageType::kReport, 100, &second);
  EXPECT_EQ(CodeOf(second), Code::kResourceExhausted);
  // Who heard of a refusal of what was done would do it again.
  Response done;
  done.control = {{"a", std::string(900 << 10, 'x')}};
  PackReply(memory->Of("t"), wire::MessageType::kStep, 100, &done);
  EXPECT_FALSE(done.error);
  EXPECT_GT(memory->used(MemoryKind::kMessages), 1400u << 10);
}

TEST_F(RequestHandlerTest, PutsAndSessionsOfOneTenantLeaveRoomForOthers) {
  Put("alice");
  Put("bob");
  Slots puts(4, "puts", "files"), sessions(4, "sessions", "limits.max_sessions");
  const auto handler = [&](const std::string& tenant) {
    return std::make_unique<RequestHandler>(*store_, Peer{tenant, false, true}, std::span(region_),
                                            HandlerLimits{1 << 20, 16, {}, &puts, &sessions},
                                            [] { return wire::ServerStats{}; });
  };
  auto alice = handler("alice"), again = handler("alice"), bob = handler("bob");
  for (int i = 0; i < 3; ++i) {
    auto& own = i < 2 ? alice : again;
    EXPECT_FALSE(Ask(*own, MessageType::kAttach, AttachControl("alice"), Tokens()).error);
  }
  const Response refused = Ask(*again, MessageType::kAttach, AttachControl("alice"), Tokens());
  EXPECT_EQ(CodeOf(refused), Code::kResourceExhausted);
  EXPECT_FALSE(Ask(*bob, MessageType::kAttach, AttachControl("bob"), Tokens()).error);
  alice->ReleaseAll();
  EXPECT_FALSE(Ask(*again, MessageType::kAttach, AttachControl("alice"), Tokens()).error);
  const Json begin = {{"put", {{"model", prompt_.model.name}}}, {"in", {{0, 400}}}};
  for (int i = 0; i < 3; ++i) {
    EXPECT_FALSE(Ask(*again, MessageType::kBeginPut, begin, Tokens()).error);
  }
  EXPECT_EQ(CodeOf(Ask(*alice, MessageType::kBeginPut, begin, Tokens())), Code::kResourceExhausted);
  EXPECT_FALSE(Ask(*bob, MessageType::kBeginPut, begin, Tokens()).error);
}

// What a reply carries is counted until it is sent, whoever makes it.
TEST_F(RequestHandlerTest, SelectionsAndSummariesAreCounted) {
  const std::string id = Put("alice");
  ASSERT_TRUE(store_->WaitReady(id, {}).ok());
  const auto memory = MemoryBudget::Create({.capacity = 8 << 20});
  RequestHandler handler(*store_, {"alice", false, true}, std::span(region_),
                         {64 << 20, 2, memory->Of("alice")}, [] { return wire::ServerStats{}; });
  const Json attached =
      Ask(handler, MessageType::kAttach, AttachControl("alice"), Tokens()).control;
  const KvGeometry& g = prompt_.model.geometry;
  const std::vector<float> q(size_t{g.n_q_heads / g.n_kv_heads} * g.key_dim, 0.5f);
  const auto bytes = wire::BytesOf(std::span<const float>(q));
  Json at = {{"session", attached["session"]}, {"layer", 0}, {"kv_head", 0}};
  for (const uint32_t k : {10u, UINT32_MAX}) {
    Json select = at;
    select["k"] = k;
    select["in"] = {{0, bytes.size()}};
    const Response found = Ask(handler, MessageType::kSelect, select, {bytes.begin(), bytes.end()});
    ASSERT_FALSE(found.error) << found.error->message;
    EXPECT_EQ(memory->used(MemoryKind::kMessages), std::min<uint64_t>(k, 100) * sizeof(uint32_t));
    EXPECT_LE(found.payload.size(), memory->used(MemoryKind::kMessages));
  }
  at["kind"] = "moment";
  const Response summary = Ask(handler, MessageType::kSummary, at);
  ASSERT_FALSE(summary.error) << summary.error->message;
  EXPECT_GT(summary.payload.size(), 0u);
  EXPECT_EQ(memory->used(MemoryKind::kMessages), summary.payload.size());
}

TEST_F(RequestHandlerTest, AnExactPassTakesTheMemoryOfItsCopies) {
  Put("alice");
  auto handler = Handler({"alice", false, true});
  const Json attached =
      Ask(*handler, MessageType::kAttach, AttachControl("alice"), Tokens()).control;
  const KvGeometry& g = prompt_.model.geometry;
  constexpr uint32_t kQueries = 64;
  const size_t y = size_t{kQueries} * g.n_q_heads * g.value_dim * sizeof(float);
  const size_t lse = size_t{kQueries} * g.n_q_heads * sizeof(float);
  const std::vector<std::byte> q(size_t{kQueries} * g.n_q_heads * g.key_dim * sizeof(float));
  const Json exact = {{"session", attached["session"]},
                      {"layer", 0},
                      {"n", kQueries},
                      {"in", {{0, q.size()}}},
                      {"out", {{0, y}, {y, lse}}}};
  ASSERT_FALSE(Ask(*handler, MessageType::kAttendExact, exact, q).error);
  const MemoryCharge rest =
      store_->memory()->Shared().Charge(MemoryKind::kMessages, uint64_t{1} << 40);
  const Response refused = Ask(*handler, MessageType::kAttendExact, exact, q);
  ASSERT_EQ(CodeOf(refused), Code::kResourceExhausted);
  EXPECT_NE(refused.error->message.find("more for scratch"), std::string::npos)
      << refused.error->message;
}

// A client that waits for others asks again every few milliseconds: these answers are no failures.
TEST_F(RequestHandlerTest, AnswersToWhoWaitsForOtherPutsAreMarked) {
  auto one = Handler({"", false, true}), two = Handler({"", false, true});
  const auto begin = [&](RequestHandler& handler, Json put) {
    put["model"] = prompt_.model.name;
    return Ask(handler, MessageType::kBeginPut, {{"put", put}, {"in", {{0, 400}}}}, Tokens());
  };
  const Response whole = begin(*one, Json::object());
  ASSERT_FALSE(whole.error);
  const Response alone = begin(*two, {{"alone", true}});
  EXPECT_EQ(CodeOf(alone), Code::kUnavailable);
  EXPECT_TRUE(alone.waits);
  const Json put = {{"put", whole.control["put"]}};
  const Response early = Ask(*one, MessageType::kPutCommit, put);  // rows are missing
  EXPECT_EQ(CodeOf(early), Code::kFailedPrecondition);
  EXPECT_FALSE(early.waits);
  EXPECT_FALSE(Ask(*one, MessageType::kPutAbort, put).error);
  EXPECT_FALSE(Ask(*one, MessageType::kPutCommit, put).waits);  // no such put

  const Response part = begin(*one, {{"first_head", 0}, {"n_heads", 1}});
  ASSERT_FALSE(part.error);
  const Json own = {{"put", part.control["put"]}};
  const KvGeometry& g = prompt_.model.geometry;
  const size_t k = size_t{100} * g.key_dim * 2, v = size_t{100} * g.value_dim * 2;
  for (uint32_t layer = 0; layer < g.n_layers; ++layer) {
    Json rows = own;
    rows["layer"] = layer, rows["first"] = 0, rows["n"] = 100, rows["in"] = {{0, k}, {k, v}};
    ASSERT_FALSE(Ask(*one, MessageType::kPutWrite, rows, std::vector<std::byte>(k + v)).error);
  }
  const Response others = Ask(*one, MessageType::kPutCommit, own);
  EXPECT_EQ(CodeOf(others), Code::kFailedPrecondition);
  EXPECT_TRUE(others.waits) << others.error->message;
}

// The description of a prefix takes several reads, which an attach has no use for.
TEST_F(RequestHandlerTest, AttachByIdDescribesNoPrefix) {
  const auto control = std::make_shared<prefixd::testing::SteppingStore::Control>();
  prefixd::testing::SteppingStore store(control);
  const Json attach = {{"attach", {{"prefix", "alice/p"}}}};
  RequestHandler handler(store, {"alice", false, true}, std::span(region_),
                         HandlerLimits{1 << 20, 2}, [] { return wire::ServerStats{}; });
  EXPECT_FALSE(Ask(handler, MessageType::kAttach, attach).error);
  EXPECT_EQ(control->described, 0);
}

TEST_F(RequestHandlerTest, WantOfMemoryIsTheErrorOfItsCall) {
  const auto control = std::make_shared<prefixd::testing::SteppingStore::Control>();
  prefixd::testing::SteppingStore store(control);
  RequestHandler handler(store, {"", false, true}, std::span(region_), HandlerLimits{1 << 20, 2},
                         [] { return wire::ServerStats{}; });
  control->throws = true;
  EXPECT_EQ(CodeOf(Ask(handler, MessageType::kStats, Json::object())), Code::kResourceExhausted);
  control->throws = false;
  EXPECT_FALSE(Ask(handler, MessageType::kStats, Json::object()).error);
}

TEST_F(RequestHandlerTest, APutIsNotIdleWhenALongCallOnItHasJustEnded) {
  using Clock = std::chrono::steady_clock;
  constexpr auto kIdle = std::chrono::seconds(1);
  const auto control = std::make_shared<prefixd::testing::SteppingStore::Control>();
  prefixd::testing::SteppingStore store(control);
  RequestHandler handler(store, {"", false, true}, std::span(region_), HandlerLimits{1 << 20, 2},
                         [] { return wire::ServerStats{}; });
  const Response begun =
      Ask(handler, MessageType::kBeginPut, {{"put", {{"model", "m"}}}, {"in", {{0, 4}}}}, Tokens());
  ASSERT_FALSE(begun.error) << begun.error->message;
  const Json rows = {{"put", begun.control["put"]},
                     {"layer", 0},
                     {"first", 0},
                     {"n", 1},
                     {"in", {{0, 4}, {4, 4}}}};
  Clock::duration since_end{};
  bool idle = false;
  do {  // where the machine is so slow that the put was idle after its call, once more
    control->Hold();
    Response written;
    std::thread call([&] { written = Ask(handler, MessageType::kPutWrite, rows, Tokens()); });
    control->AwaitHeld(1);
    std::this_thread::sleep_for(kIdle + std::chrono::milliseconds(100));
    const auto end = Clock::now();
    control->Release();
    call.join();
    ASSERT_FALSE(written.error) << written.error->message;
    idle = handler.HasIdlePut(kIdle);
    since_end = Clock::now() - end;
  } while (since_end >= kIdle);
  EXPECT_FALSE(idle);
}

}  // namespace
}  // namespace prefixd::daemon
