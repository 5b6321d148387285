// Tests requests without a transport: tenants, hostile extents, what ends with a connection.
#include "daemon/calls/request_handler.h"

#include <nlohmann/json.hpp>
#include <random>
#include <set>

#include "base/every_page.h"
#include "runtime/store/local_store.h"
#include "tests/daemon/calls/request_fixture.h"
#include "tests/daemon/put_prompt.h"
#include "tests/protocol/requests.h"
#include "tests/support/files.h"
#include "tests/support/seed.h"
#include "tests/support/test.h"

namespace prefixd::daemon {
namespace {

using wire::Json;
using wire::MessageType;

// A short request may ask for a large answer: its memory is taken before it is allocated.
TEST_F(RequestHandlerTest, AnswersAreShedWhenMemoryIsShortAndSmallOnesAreNot) {
  Put("alice");
  const auto memory = MemoryBudget::Create({.capacity = 8 << 20});
  RequestHandler handler(*store_, {"alice", false, true}, std::span(region_),
                         {64 << 20, 2, memory->Of("alice")}, [] { return wire::ServerStats{}; });
  const Json attached =
      Ask(handler, MessageType::kAttach, AttachControl("alice"), Tokens()).control;
  const auto read = [&](uint64_t bytes) {
    return Ask(
        handler, MessageType::kReadTokens,
        {{"session", attached["session"]}, {"begin", 0}, {"end", 100}, {"out", {{0, bytes}}}});
  };
  {
    const Response good = read(400);
    ASSERT_FALSE(good.error);
    EXPECT_EQ(memory->used(MemoryKind::kMessages), 400u);  // until it is sent
  }
  EXPECT_EQ(memory->used(), 0u);
  EXPECT_EQ(CodeOf(read(1 << 20)), Code::kInvalidArgument);  // it fits, and is the wrong size
  const MemoryCharge rest = memory->Shared().Charge(MemoryKind::kPuts, 8 << 20);
  const Response shed = read(1 << 20);
  ASSERT_TRUE(shed.error);
  EXPECT_EQ(shed.error->code, Code::kResourceExhausted);
  EXPECT_GT(shed.error->retry_after_ms, 0u);
  EXPECT_EQ(memory->used(MemoryKind::kMessages), 0u);
  EXPECT_FALSE(read(400).error);  // small ones go on
}

TEST_F(RequestHandlerTest, TenantsSeeOnlyTheirOwn) {
  const std::string id = Put("alice");
  auto alice = Handler({"alice", false, true});
  auto bob = Handler({"bob", false, true});
  auto admin = Handler({"", true, true});
  EXPECT_EQ(Ask(*alice, MessageType::kListPrefixes, Json::object()).control["prefixes"].size(), 1u);
  EXPECT_EQ(Ask(*bob, MessageType::kListPrefixes, Json::object()).control["prefixes"].size(), 0u);
  EXPECT_EQ(Ask(*admin, MessageType::kListPrefixes, Json::object()).control["prefixes"].size(), 1u);

  // Prefixes of other tenants look exactly like absent ones.
  const Json foreign = {{"prefix", id}};
  for (MessageType type : {MessageType::kPrefix, MessageType::kRemove, MessageType::kVerify,
                           MessageType::kWaitReady, MessageType::kSetLifetime}) {
    const Response r = Ask(*bob, type, foreign);
    EXPECT_EQ(CodeOf(r), Code::kNotFound) << wire::MessageName(type);
  }
  EXPECT_EQ(CodeOf(Ask(*bob, MessageType::kAttach, Json{{"attach", {{"prefix", id}}}})),
            Code::kNotFound);
  EXPECT_EQ(CodeOf(Ask(*bob, MessageType::kAttach, AttachControl("bob"), Tokens())),
            Code::kNotFound);
  EXPECT_EQ(CodeOf(Ask(*bob, MessageType::kAttach, AttachControl("alice"), Tokens())),
            Code::kInvalidArgument);
  Json match = {{"match", {{"model", prompt_.model.name}, {"tenant", "alice"}}},
                {"in", {{0, 400}}}};
  EXPECT_EQ(CodeOf(Ask(*bob, MessageType::kMatch, match, Tokens())), Code::kInvalidArgument);
  EXPECT_EQ(Ask(*admin, MessageType::kMatch, match, Tokens()).control["n_tokens"], 100);
  EXPECT_EQ(Ask(*bob, MessageType::kVerify, {{"prefix", ""}}).control["segments"], 0);
  EXPECT_EQ(Ask(*alice, MessageType::kVerify, {{"prefix", ""}}).control["segments"], 1);
}

TEST_F(RequestHandlerTest, AVerificationCoversTheTenantsSegmentsEachOnce) {
  const std::string first = Put("alice");
  prompt_ = Longer(prompt_, 40);
  const std::string second = Put("alice");
  prompt_ = Longer(prompt_, 10);  // too few to be compacted meanwhile
  const std::string third = Put("alice");
  Put("bob");
  ASSERT_TRUE(store_->Remove(first).ok());  // others continue it: it stays, without a name
  auto alice = Handler({"alice", false, true});
  auto admin = Handler({"", true, true});
  const Json ask = {{"prefix", ""}}, of_alice = {{"prefix", ""}, {"tenant", "alice"}};
  const std::set<std::string> wanted = {first, second, third};
  for (const Response& r :
       {Ask(*alice, MessageType::kVerify, ask), Ask(*alice, MessageType::kVerify, of_alice),
        Ask(*alice, MessageType::kVerify, {{"prefix", third}}),
        Ask(*admin, MessageType::kVerify, of_alice)}) {
    ASSERT_FALSE(r.error) << r.error->message;
    EXPECT_EQ(r.control["segments"], 3);
    const auto covered = r.control["covered"].get<std::set<std::string>>();
    EXPECT_EQ(covered, wanted);
  }
  EXPECT_EQ(Ask(*admin, MessageType::kVerify, ask).control["segments"], 4);
  auto bob = Handler({"bob", false, true});
  EXPECT_EQ(CodeOf(Ask(*bob, MessageType::kVerify, of_alice)), Code::kInvalidArgument);
}

// A prefix that goes while its tenant is verified is no error.
TEST_F(RequestHandlerTest, AVerificationSurvivesRemovals) {
  std::vector<std::string> ids;
  for (int i = 0; i < 4; ++i) {
    prompt_ = prefixd::testing::MakePrompt(100, 1000 + i);
    ids.push_back(Put("alice"));
  }
  auto alice = Handler({"alice", false, true});
  bool removed = false;
  const Response r = alice->Handle({MessageType::kVerify, false, {{"prefix", ""}}, {}},
                                   [&](uint64_t done, uint64_t, std::string_view) {
                                     if (done > 0 && !std::exchange(removed, true)) {
                                       for (const std::string& id : ids)
                                         EXPECT_TRUE(store_->Remove(id).ok());
                                     }
                                     return true;
                                   });
  ASSERT_FALSE(r.error) << r.error->message;
  EXPECT_EQ(r.control["segments"], 1);
  EXPECT_TRUE(r.control["damaged"].empty());
}

TEST_F(RequestHandlerTest, StrangersChangeNoModels) {
  auto stranger = Handler({"", false, false});
  Json model = wire::ToJson(prompt_.model);
  EXPECT_FALSE(Ask(*stranger, MessageType::kRegisterModel, {{"model", model}}).error);
  model["feature_maps"] = {"/etc/passwd"};
  EXPECT_EQ(CodeOf(Ask(*stranger, MessageType::kRegisterModel, {{"model", model}})),
            Code::kInvalidArgument);
  model["feature_maps"] = Json::array();
  model["identity"] = Json::parse(R"([["weights", "other"]])");
  EXPECT_EQ(CodeOf(Ask(*stranger, MessageType::kRegisterModel, {{"model", model}})),
            Code::kAlreadyExists);
}

TEST_F(RequestHandlerTest, StrangersNameNoFilesOfScorers) {
  const std::string id = Put("alice");
  auto alice = Handler({"alice", false, false});
  const Json spec = {{"policy", "kvpop"}, {"scorers", "/etc/passwd"}};
  const Response r = Ask(*alice, MessageType::kCompress, {{"prefix", id}, {"compress", spec}});
  EXPECT_EQ(CodeOf(r), Code::kInvalidArgument);
  ASSERT_TRUE(r.error);
  EXPECT_NE(r.error->message.find("over its Unix socket"), std::string::npos) << r.error->message;
  // The daemon's own user may, by a path that does not depend on where the daemon runs.
  auto own = Handler({"alice", false, true});
  const auto message = [&](const char* path) {
    const Json of = {{"policy", "kvpop"}, {"scorers", path}};
    const Response answer = Ask(*own, MessageType::kCompress, {{"prefix", id}, {"compress", of}});
    return answer.error ? answer.error->message : "";
  };
  EXPECT_NE(message("scorers.safetensors").find("by its whole path"), std::string::npos);
  EXPECT_EQ(message("/nowhere/scorers").find("Unix socket"), std::string::npos);
  EXPECT_EQ(message("/nowhere/scorers").find("whole path"), std::string::npos);
}

TEST_F(RequestHandlerTest, ExtentsOutsideTheAreaAreRefused) {
  Put("");
  auto handler = Handler({"", false, true});
  const Response attached = Ask(*handler, MessageType::kAttach, AttachControl(""), Tokens());
  ASSERT_FALSE(attached.error) << attached.error->message;
  const Json session = attached.control["session"];
  const auto step = [&](Json in, Json out) {
    Json control = {{"steps", {{{"session", session}, {"layer", 0}}}}, {"in", in}, {"out", out}};
    return Ask(*handler, MessageType::kStep, control, {}, /*shared=*/true);
  };
  const Json good_in = {{0, 256}}, good_out = {{256, 256}, {512, 16}};
  const Response ok = step(good_in, good_out);
  ASSERT_FALSE(ok.error) << ok.error->message;
  EXPECT_FALSE(ok.control["steps"][0].contains("error")) << ok.control.dump();
  const std::vector<std::byte> before = region_;
  for (const char* bad :
       {"[[4000, 256]]", "[[18446744073709551615, 256]]", "[[18446744073709551360, 256]]",
        "[[0, 18446744073709551615]]", "[[4097, 0]]", "[[-1, 256]]", "[[0.5, 256]]",
        "[[\"0\", 256]]", "[[0]]", "[]", "\"everything\""}) {
    EXPECT_EQ(CodeOf(step(Json::parse(bad), good_out)), Code::kInvalidArgument) << bad;
  }
  for (const char* bad : {"[[3900, 256], [512, 16]]", "[[256, 256], [18446744073709551612, 16]]",
                          "[[256, 256]]", "[[0, 4096], [0, 4096]]"}) {
    EXPECT_EQ(CodeOf(step(good_in, Json::parse(bad))), Code::kInvalidArgument) << bad;
  }
  EXPECT_EQ(region_, before);  // a refused request writes nothing
}

TEST_F(RequestHandlerTest, PutsAndSessionsEndWithTheConnection) {
  auto handler = Handler({"", false, true});
  Json begin = {{"put", {{"model", prompt_.model.name}}}, {"in", {{0, 400}}}};
  const Response put = Ask(*handler, MessageType::kBeginPut, begin, Tokens());
  ASSERT_FALSE(put.error) << put.error->message;
  std::vector<std::byte> rows = prompt_.k[0];
  rows.insert(rows.end(), prompt_.v[0].begin(), prompt_.v[0].end());
  const Json write = {
      {"put", put.control["put"]},
      {"layer", 0},
      {"first", 0},
      {"n", 100},
      {"in", {{0, prompt_.k[0].size()}, {prompt_.k[0].size(), prompt_.v[0].size()}}}};
  const Response written = Ask(*handler, MessageType::kPutWrite, write, rows);
  EXPECT_FALSE(written.error) << written.error->message;
  handler->ReleaseAll();
  EXPECT_EQ(CodeOf(Ask(*handler, MessageType::kPutCommit, {{"put", put.control["put"]}})),
            Code::kNotFound);
  EXPECT_TRUE(EveryPrefix(*store_).value().empty());
  EXPECT_EQ(store_->Stats().value().puts_aborted, 1u);

  const std::string id = Put("");
  ASSERT_FALSE(Ask(*handler, MessageType::kAttach, AttachControl(""), Tokens()).error);
  EXPECT_EQ(store_->Stats().value().sessions, 1u);
  handler->ReleaseAll();
  EXPECT_EQ(store_->Stats().value().sessions, 0u);
}

// Of a write in pieces none is carried out whose predecessor was not.
TEST_F(RequestHandlerTest, PiecesOfAWriteFollowOneAnother) {
  auto handler = Handler({"", false, true});
  const Response put =
      Ask(*handler, MessageType::kBeginPut,
          {{"put", {{"model", prompt_.model.name}}}, {"in", {{0, 400}}}}, Tokens());
  ASSERT_FALSE(put.error) << put.error->message;
  const auto write = [&](uint32_t layer, uint32_t piece, bool finite = true) {
    const size_t bytes = 25 * 64;  // of 25 tokens
    std::vector<std::byte> rows(2 * bytes, std::byte{1});
    if (!finite) std::fill_n(rows.begin() + 100, 2, std::byte{0x7f});
    if (!finite) rows[100] = std::byte{0xff};
    return CodeOf(Ask(*handler, MessageType::kPutWrite,
                      {{"put", put.control["put"]},
                       {"layer", layer},
                       {"first", 25 * piece},
                       {"n", 25},
                       {"piece", piece},
                       {"in", {{0, bytes}, {bytes, bytes}}}},
                      rows));
  };
  constexpr Code kDone = Code::kInternal;  // as CodeOf says where there is no error
  EXPECT_EQ(write(0, 1), Code::kFailedPrecondition);
  EXPECT_EQ(write(0, 0), kDone);
  // Of another write whose piece 0 did not come here, though the number is the next one.
  EXPECT_EQ(write(1, 1), Code::kFailedPrecondition);
  EXPECT_EQ(write(0, 1, false), Code::kInvalidArgument);
  EXPECT_EQ(write(0, 2), Code::kFailedPrecondition);
  EXPECT_EQ(write(0, 3), Code::kFailedPrecondition);
  for (const uint32_t layer : {1u, 0u}) {
    if (layer == 1) {
      EXPECT_EQ(write(layer, 0), kDone);
    }
    // The same write goes on as another, which begins with a piece 0.
    for (uint32_t piece = 1; piece < 4; ++piece) {
      EXPECT_EQ(write(layer, piece), layer == 1 ? kDone : Code::kFailedPrecondition);
    }
  }
  EXPECT_EQ(CodeOf(Ask(*handler, MessageType::kPutWrite,
                       {{"put", put.control["put"]}, {"piece", "first"}})),
            Code::kInvalidArgument);
}

TEST_F(RequestHandlerTest, OpenPutsAreBounded) {
  auto handler = Handler({"", false, true});
  Json begin = {{"put", {{"model", prompt_.model.name}}}, {"in", {{0, 400}}}};
  EXPECT_FALSE(Ask(*handler, MessageType::kBeginPut, begin, Tokens()).error);
  EXPECT_FALSE(Ask(*handler, MessageType::kBeginPut, begin, Tokens()).error);
  EXPECT_EQ(CodeOf(Ask(*handler, MessageType::kBeginPut, begin, Tokens())),
            Code::kResourceExhausted);
}

TEST_F(RequestHandlerTest, RowsInPlaceAreCheckedAndEndWithTheConnection) {
  Put("alice");
  Put("bob");
  const Peer peer{"alice", false, true, true};
  auto alice = Handler(peer);
  const Response attached = Ask(*alice, MessageType::kAttach, AttachControl("alice"), Tokens());
  ASSERT_FALSE(attached.error) << attached.error->message;
  const std::vector<uint32_t> ids = {3, 50, 99};
  const auto payload = [&](std::span<const uint32_t> list) {
    const auto bytes = wire::BytesOf(list);
    return std::vector<std::byte>(bytes.begin(), bytes.end());
  };
  const Json good = {{"session", attached.control["session"]},
                     {"layer", 1},
                     {"kv_head", 0},
                     {"regions", Json::array()},
                     {"in", {{0, 12}}},
                     {"out", {{0, 48}}}};
  const Response first = Ask(*alice, MessageType::kReadInPlace, good, payload(ids));
  ASSERT_FALSE(first.error) << first.error->message;
  EXPECT_GE(first.fd, 0);
  ASSERT_EQ(first.payload.size(), 48u);
  EXPECT_GT(store_->Stats().value().host_tier_pinned, 0u);
  Json again = good;
  again["regions"] = Json::array({first.control["region"]});
  const Response second = Ask(*alice, MessageType::kReadInPlace, again, payload(ids));
  ASSERT_FALSE(second.error);
  EXPECT_EQ(second.fd, -1);  // the client has mapped this region already
  EXPECT_EQ(second.payload, first.payload);

  const auto refused = [&](const char* key, Json value) {
    Json bad = good;
    bad[key] = std::move(value);
    return CodeOf(Ask(*alice, MessageType::kReadInPlace, bad, payload(ids)));
  };
  EXPECT_EQ(refused("session", 77), Code::kNotFound);
  EXPECT_EQ(refused("layer", 2), Code::kInvalidArgument);
  EXPECT_EQ(refused("regions", "all"), Code::kInvalidArgument);
  EXPECT_EQ(refused("in", Json::parse("[[0, 0]]")), Code::kInvalidArgument);
  EXPECT_EQ(refused("in", Json::parse("[[0, 16]]")), Code::kInvalidArgument);
  EXPECT_EQ(refused("out", Json::parse("[[0, 47]]")), Code::kInvalidArgument);
  EXPECT_EQ(refused("out", Json::array()), Code::kInvalidArgument);
  EXPECT_EQ(CodeOf(Ask(*alice, MessageType::kReadInPlace, good,
                       payload(std::vector<uint32_t>{3, 50, 100}))),
            Code::kInvalidArgument);
  Peer far = peer;
  far.local = false;
  auto remote = Handler(far);
  ASSERT_FALSE(Ask(*remote, MessageType::kAttach, AttachControl("alice"), Tokens()).error);
  EXPECT_EQ(CodeOf(Ask(*remote, MessageType::kReadInPlace, good, payload(ids))),
            Code::kFailedPrecondition);

  // A tenant's name is hidden from other tenants.
  auto bob = Handler({"bob", false, true, true});
  ASSERT_FALSE(Ask(*bob, MessageType::kAttach, AttachControl("bob"), Tokens()).error);
  const Json seen = Ask(*bob, MessageType::kStats, Json::object()).control["runtime"];
  ASSERT_EQ(seen["host_tenants"].size(), 1u);
  EXPECT_EQ(seen["host_tenants"][0]["tenant"], "bob");
  auto admin = Handler({"", true, true, true});
  const Json all = Ask(*admin, MessageType::kStats, Json::object()).control["runtime"];
  EXPECT_EQ(all["host_tenants"].size(), 2u);
  EXPECT_EQ(all["memory_tenants"].size(), 2u);
  ASSERT_EQ(seen["memory_tenants"].size(), 1u);
  EXPECT_EQ(seen["memory_tenants"][0]["tenant"], "bob");

  const uint64_t both = store_->Stats().value().host_tier_pinned;
  const Json release = {{"release", {second.control["hold"]}}};
  EXPECT_EQ(CodeOf(Ask(*bob, MessageType::kReleaseRows, release)), Code::kNotFound);
  EXPECT_FALSE(Ask(*alice, MessageType::kReleaseRows, release).error);
  EXPECT_EQ(store_->Stats().value().host_tier_pinned, both / 2);
  EXPECT_EQ(CodeOf(Ask(*alice, MessageType::kReleaseRows, release)), Code::kNotFound);
  alice->ReleaseAll();
  // The answer that carries the descriptor keeps it open until it is sent.
  EXPECT_EQ(store_->Stats().value().host_tier_pinned, both / 2);
}

// Any message with any control part gets an error or an answer, and never crashes the handler.
TEST_F(RequestHandlerTest, RandomRequests) {
  std::mt19937_64 rng(prefixd::testing::Seed("RequestHandler.Random"));
  Put("");
  auto handler = Handler({"", false, false, true});
  ASSERT_FALSE(Ask(*handler, MessageType::kAttach, AttachControl(""), Tokens()).error);
  const Json values = Json::parse(R"([0, 1, 2, 18446744073709551615, -1, 1.5, "x", "phi", null,
      true, [], [[0, 256]], [[0, 4], [4, 4]], [[0, 256], [256, 16]], {},
      {"session": 1, "layer": 0}, [{"session": 1, "layer": 0, "info": 7}]])");
  const char* keys[] = {"session",    "put",       "layer",   "kv_head",  "first",      "n",
                        "k",          "in",        "out",     "kind",     "begin",      "end",
                        "steps",      "model",     "prefix",  "attach",   "policy",     "tenant",
                        "match",      "regions",   "release", "lifetime", "first_head", "n_heads",
                        "head_major", "own_after", "persist", "window"};
  const std::vector<MessageType> types = prefixd::testing::AllRequests();
  std::set<MessageType> drawn;
  for (int i = 0; i < 3000; ++i) {
    Json control = Json::object();
    for (const char* key : keys) {
      if (rng() % 3) control[key] = values[rng() % values.size()];
    }
    if (rng() % 2) control["session"] = 1;
    const MessageType type = types[rng() % types.size()];
    // Detach is drawn late only, because most messages need a session.
    if (type == MessageType::kDetach && i < 2400) continue;
    drawn.insert(type);
    const Response answer =
        Ask(*handler, type, control, std::vector<std::byte>(rng() % 1024), rng() % 2);
    // The connection itself handles these two; the handler must know every other message.
    if (type == MessageType::kHello || type == MessageType::kCancel) continue;
    const std::string said = answer.error ? answer.error->message : "";
    ASSERT_EQ(said.find("is not expected here"), std::string::npos) << said;
  }
  EXPECT_EQ(drawn.size(), types.size());
  EXPECT_FALSE(Ask(*handler, MessageType::kStats, Json::object()).error);
}

}  // namespace
}  // namespace prefixd::daemon
