// Tests the codec and the frames: round trips, and hostile bytes, which must neither crash a reader
// nor make it allocate more than was sent.
#include <unistd.h>

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <random>
#include <set>
#include <string>

#include "base/statistics.h"
#include "prefixd/kv_shape.h"
#include "prefixd/lists.h"
#include "prefixd/match.h"
#include "prefixd/model.h"
#include "prefixd/policy.h"
#include "prefixd/prefix_summary.h"
#include "prefixd/put.h"
#include "prefixd/session_info.h"
#include "prefixd/verify.h"
#include "protocol/address.h"
#include "protocol/codec.h"
#include "protocol/frame.h"
#include "protocol/msgpack_check.h"
#include "protocol/shared_region.h"
#include "tests/protocol/requests.h"
#include "tests/support/seed.h"
#include "tests/support/test.h"

namespace prefixd::wire {
namespace {

std::string Hex(std::span<const std::byte> bytes) {
  std::string text;
  for (std::byte b : bytes) {
    char pair[3];
    std::snprintf(pair, sizeof(pair), "%02x", std::to_integer<unsigned>(b));
    text += pair;
  }
  return text;
}

// Sends a value through MessagePack and back. Values are equal when their JSON forms are.
template <typename T>
T RoundTrip(const T& value) {
  auto unpacked = UnpackControl(PackControl({{"value", ToJson(value)}}));
  EXPECT_TRUE(unpacked.ok());
  if (!unpacked.ok()) return T{};
  auto decoded = FromJson<T>((*unpacked)["value"], "value");
  EXPECT_TRUE(decoded.ok()) << (decoded.ok() ? "" : decoded.error().message);
  if (!decoded.ok()) return T{};
  EXPECT_EQ(ToJson(*decoded).dump(), ToJson(value).dump());
  return *decoded;
}

ModelSpec SomeModel() {
  ModelSpec m;
  m.name = "m";
  m.geometry = {2, 8, 2, 64, 32, DType::kF16, {{0.125f, 0, 0}, {0.1f, 30.f, 4096}}};
  m.identity = {{"weights", "sha256:ab"}, {"rope", "1e6"}, {"weights", "again"}};
  m.feature_maps = {"/a/b.safetensors"};
  return m;
}

TEST(Codec, ModelsKeepGeometryAndIdentityOrder) {
  const ModelSpec m = SomeModel();
  const ModelSpec back = RoundTrip(m);
  EXPECT_EQ(back.geometry, m.geometry);
  EXPECT_EQ(back.identity, m.identity);
  EXPECT_EQ(back.feature_maps, m.feature_maps);
}

TEST(Codec, PoliciesOfEveryKind) {
  for (StepMode mode : {StepMode::kFull, StepMode::kAnchors, StepMode::kRetrieve}) {
    for (const char* name :
         {"none", "phi/per_feature/bf16", "moment", "moment/r8/cov/parent", "scan", "auto"}) {
      const EstimatorVariant e = *EstimatorVariant::Parse(name);
      StepPolicy p{mode, e, 0.037, std::nullopt, 9, "ivf"};
      EXPECT_EQ(RoundTrip(p), p);
      p.k = 0;
      p.adaptive = p.report_missing = true;
      p.fixed = {{1, 2, e}, {3, 0, EstimatorKind::kNone}};
      EXPECT_EQ(RoundTrip(p), p);
    }
  }
}

TEST(Codec, LargeNumbersAndNonFiniteOnes) {
  Ledger l;
  l.logical_bytes = std::numeric_limits<uint64_t>::max();
  l.physical_bytes = {1, 2, 1ull << 63};
  l.rho_z_sum = 0.1;
  l.summary_bytes = {1, 2, 3, 4, 5, 6};
  EXPECT_EQ(RoundTrip(l).physical_bytes, l.physical_bytes);
  EXPECT_EQ(RoundTrip(l).summary_bytes, l.summary_bytes);
  Selection s;
  s.cuts = {{-std::numeric_limits<float>::infinity(), CutKind::kExact},
            {std::numeric_limits<float>::infinity(), CutKind::kNone}};
  EXPECT_EQ(RoundTrip(s).cuts[0].score, s.cuts[0].score);
  PrefixDetail d;
  d.choices = {{1, 2, EstimatorKind::kScan, 0.02, {{EstimatorKind::kScan, 0.25}}}};
  EXPECT_EQ(RoundTrip(d).choices, d.choices);
  StepInfo info;
  info.k_per_head = {3, 4};
  info.rho_z = {0.5f, std::numeric_limits<float>::quiet_NaN()};
  info.missing = {{0.25, true}, {0.5, false}};
  const StepInfo back = RoundTrip(info);
  EXPECT_EQ(back.k_per_head, info.k_per_head);
  EXPECT_EQ(back.rho_z[0], 0.5f);
  EXPECT_TRUE(std::isnan(back.rho_z[1]));
  EXPECT_TRUE(back.missing[0].certified && back.missing[1].delta == 0.5);
}

// The other side may know another number of estimators and tiers.
TEST(Codec, PartsOfACounterGoByName) {
  const Json newer = {{"steps", 7},
                      {"summary_bytes", {{"moment", 5}, {"of_next_year", 9}}},
                      {"physical_bytes", {{"ssd", 4096}, {"tape", 1}, {"host", 64}}}};
  const auto ledger = FromJson<Ledger>(newer, "ledger");
  ASSERT_TRUE(ledger.ok()) << ledger.error().message;
  EXPECT_EQ(ledger->steps, 7u);
  EXPECT_EQ(ledger->summary_bytes, (std::array<uint64_t, kEstimatorKinds>{0, 0, 5, 0, 0, 0}));
  EXPECT_EQ(ledger->physical_bytes, (std::array<uint64_t, kTierCount>{0, 64, 4096}));
  const auto wrong = FromJson<Ledger>(Json{{"physical_bytes", {{"ssd", -1}}}}, "ledger");
  ASSERT_FALSE(wrong.ok());
  EXPECT_EQ(wrong.error().message.find("ledger.physical_bytes.ssd: expected a whole number"), 0u);
  EXPECT_FALSE(FromJson<Ledger>(Json{{"physical_bytes", {1, 2, 3}}}, "ledger").ok());
}

// Sends S once for each member, which has another value than its default.
template <typename S>
void EachStatisticTravels() {
  ForEachStatistic<S>([](const auto& statistic) {
    S stats;
    auto& member = stats.*statistic.member;
    using Member = std::remove_reference_t<decltype(member)>;
    if constexpr (requires { member.resize(2); } && !std::is_same_v<Member, std::string>) {
      member.resize(2);
    } else if constexpr (std::is_same_v<Member, std::string>) {
      member = "a word";
    } else if constexpr (std::is_arithmetic_v<Member>) {
      member = static_cast<Member>(42);
    } else {
      ASSERT_EQ(statistic.parts.size(), member.size());
      member.fill(42);
    }
    EXPECT_NE(ToJson(stats), ToJson(S{})) << statistic.name;
    RoundTrip(stats);
    EXPECT_FALSE(statistic.help.empty()) << statistic.name;
  });
}

TEST(Codec, EveryStatisticTravels) {
  EachStatisticTravels<RuntimeStats>();
  EachStatisticTravels<HostTierTenant>();
  EachStatisticTravels<MemoryOfKind>();
  EachStatisticTravels<MemoryOfTenant>();
  EachStatisticTravels<TenantStats>();
  EachStatisticTravels<ServerStats>();
  EachStatisticTravels<Ledger>();
}

TEST(Codec, ErrorsTravelWithTheTimeToRetry) {
  const Error error{Code::kResourceExhausted, "no room", 500};
  const Error back = ErrorFromJson(ErrorToJson(error));
  EXPECT_EQ(back.code, error.code);
  EXPECT_EQ(back.message, error.message);
  EXPECT_EQ(back.retry_after_ms, 500u);
  const Json plain = ErrorToJson({Code::kNotFound, "nothing"});
  EXPECT_FALSE(plain.contains("retry_after_ms"));
  EXPECT_EQ(ErrorFromJson(plain).retry_after_ms, 0u);
}

TEST(Codec, TheRest) {
  RoundTrip(Hello{"c", "t", "k", true, true});
  RoundTrip(HelloReply{"s", 7, 1ull << 40, 64, 1 << 20, false});
  PutSpec put{"m", "t", {}, "label"};
  put.derived = put.accept_approximate = true, put.lineage = "ab";
  put.heads = {2, 3};
  EXPECT_EQ(RoundTrip(put).heads, put.heads);
  EXPECT_EQ(*FromJson<HeadRange>(ToJson(put), "step"), put.heads);  // a step has the same fields
  EXPECT_EQ(*FromJson<HeadRange>(Json::object(), "step"), HeadRange{});
  RoundTrip(MatchSpec{"m", "t", {}, true, "ab"});
  PutResult done{"id", 10, 5, 1 << 20, 0.25};
  done.exact_tokens = 8, done.lineage = "ab";
  RoundTrip(done);
  RoundTrip(PrefixMatch{"id", 10, 12, 9});
  RoundTrip(SessionReport{{}, {}, std::vector<Ledger>(3)});
  RoundTrip(VerifySummary{1, 2, 3, 4, {"a", "b"}, {"c"}});
  RoundTrip(std::vector<PrefixSummary>(2));
  RoundTrip(ListSpec{"after", 7, "t"});
  RoundTrip(ListSpec{});
  RoundTrip(PrefixPage{std::vector<PrefixSummary>(2), "next"});
  RoundTrip(ModelPage{std::vector<ModelSpec>(2), "next"});
}

// A byte of a control part may become a container of a hundred: that is known before it is
// unpacked.
TEST(Codec, WhatAControlPartTakesIsKnownBefore) {
  const auto memory = [](const Json& json) { return ControlMemory(PackControl(json)).value(); };
  Json arrays = Json::array(), maps = Json::array();
  for (int i = 0; i < 10000; ++i) {
    arrays.push_back(Json::array());
    maps.push_back(Json::object());
  }
  EXPECT_GT(memory({{"x", arrays}}), 10000u * (sizeof(Json) + sizeof(Json::array_t)));
  EXPECT_GT(memory({{"x", maps}}), 10000u * (sizeof(Json) + sizeof(Json::object_t)));
  EXPECT_GT(memory({{"x", std::string(5000, 'x')}}), 5000u);
  EXPECT_LT(memory({{"session", 7}, {"layer", 3}}), 1000u);
  const std::vector<std::byte> cut = {std::byte{0x92}, std::byte{1}};
  EXPECT_FALSE(ControlMemory(cut).ok());
}

TEST(Codec, SaysWhichFieldIsWrong) {
  Json j = ToJson(SomeModel());
  j["geometry"]["layers"][1]["scale"] = "big";
  const auto r = FromJson<ModelSpec>(j, "model");
  ASSERT_FALSE(r.ok());
  EXPECT_EQ(r.error().message, "model.geometry.layers[1].scale: expected a number");
  EXPECT_FALSE(FromJson<StepPolicy>(Json{{"l_gen", -1}}, "p").ok());
  EXPECT_FALSE(FromJson<StepPolicy>(Json{{"l_gen", 1ull << 32}}, "p").ok());
  EXPECT_FALSE(FromJson<StepPolicy>(Json{{"mode", "fastest"}}, "p").ok());
  EXPECT_FALSE(FromJson<StepPolicy>(Json{{"estimator", "moment/r0"}}, "p").ok());
  EXPECT_TRUE(FromJson<StepPolicy>(Json{{"from_the_future", 1}}, "p").ok());
  // An absent field of a nested object has its default, too.
  const auto sharing = FromJson<StepPolicy>(Json{{"sharing", {{"block", 16}}}}, "p");
  ASSERT_TRUE(sharing.ok());
  EXPECT_EQ(sharing->sharing, (StepPolicy::Sharing{16, 0.8, 1, false}));
  EXPECT_FALSE(sharing->window.on());
  EXPECT_FALSE(sharing->prefetch.on());
  const auto ahead = FromJson<StepPolicy>(Json{{"prefetch", {{"forward", 4}}}}, "p");
  ASSERT_TRUE(ahead.ok());
  EXPECT_EQ(ahead->prefetch, (StepPolicy::Prefetch{4, 0, 64}));
  StepPolicy narrow;
  narrow.sharing = {8, 0.75, 2, true};
  narrow.window = {0.7, 1.5};
  narrow.prefetch = {4, 1, 7};
  EXPECT_EQ(RoundTrip(narrow), narrow);
  EXPECT_FALSE(FromJson<StepPolicy>(Json{{"sharing", {{"block", -1}}}}, "p").ok());
}

// The worked example of docs/protocol.md, byte for byte.
TEST(Frames, WorkedExample) {
  const Json control = {{"session", 1}, {"layer", 3}, {"kv_head", 1},
                        {"begin", 0},   {"end", 2},   {"out", {{0, 128}}}};
  const auto packed = PackControl(control);
  EXPECT_EQ(Hex(packed),
            "86a5626567696e00a3656e6402a76b765f6865616401a56c6179657203a36f7574919200cc80a7736573"
            "73696f6e01");
  FrameHeader request;
  request.type = MessageType::kReadRange;
  request.request_id = 42;
  request.control_bytes = static_cast<uint32_t>(packed.size());
  EXPECT_EQ(Hex(EncodeHeader(request)),
            "5046584402000e002a000000000000002f000000000000000000000000000000");
  FrameHeader reply;
  reply.type = MessageType::kReply;
  reply.request_id = 42;
  reply.control_bytes = static_cast<uint32_t>(PackControl(Json::object()).size());
  reply.payload_bytes = 128;
  EXPECT_EQ(Hex(EncodeHeader(reply)),
            "50465844020000802a0000000000000001000000000000008000000000000000");
}

TEST(Frames, EveryMessageHasANumberAndANameOfItsOwn) {
  const std::vector<MessageType> all = prefixd::testing::AllRequests();
  ASSERT_FALSE(all.empty());
  EXPECT_EQ(all.front(), MessageType::kHello);
  // Numbers are never used again: those of messages that are gone stay free.
  for (const unsigned gone : {2u, 20u}) EXPECT_FALSE(IsRequest(static_cast<MessageType>(gone)));
  std::set<std::string_view> names;
  for (MessageType type : all) names.insert(MessageName(type));
  EXPECT_EQ(names.size(), all.size());
  for (MessageType type : {MessageType::kReply, MessageType::kError, MessageType::kProgress}) {
    EXPECT_FALSE(IsRequest(type));
    EXPECT_TRUE(names.insert(MessageName(type)).second);
  }
  EXPECT_FALSE(IsRequest(MessageType{0}));
}

TEST(Frames, HeadersRoundTripAndHostileOnesAreRefused) {
  std::mt19937_64 rng(prefixd::testing::Seed("Frames.Headers"));
  std::vector<MessageType> types = prefixd::testing::AllRequests();
  for (unsigned number : {0x0000u, 0x7fffu, 0x8000u, 0x8001u, 0x8002u, 0xffffu}) {
    types.push_back(static_cast<MessageType>(number));
  }
  std::set<MessageType> drawn;
  const FrameLimits limits{1 << 20, 1 << 28};
  for (int i = 0; i < 20000; ++i) {
    FrameHeader h;
    h.type = types[rng() % types.size()];
    drawn.insert(h.type);
    h.request_id = rng();
    h.control_bytes = rng() % (limits.control_bytes + 1);
    h.flags = rng() % (kKnownFlags + 1);
    h.payload_bytes = rng() % (limits.payload_bytes + 1);
    auto bytes = EncodeHeader(h);
    const auto back = DecodeHeader(bytes, limits);
    ASSERT_TRUE(back.ok());
    ASSERT_EQ(*back, h);
    bytes[rng() % bytes.size()] ^= std::byte(1 + rng() % 255);
    const auto flipped = DecodeHeader(bytes, limits);
    if (flipped.ok()) {  // an accepted header stays within the limits
      ASSERT_LE(flipped->control_bytes, limits.control_bytes);
      ASSERT_LE(flipped->payload_bytes, limits.payload_bytes);
      ASSERT_EQ(flipped->flags & ~kKnownFlags, 0u);
    }
  }
  EXPECT_EQ(drawn.size(), types.size());
  FrameHeader h;
  h.version = kVersion + 1;
  const auto newer = DecodeHeader(EncodeHeader(h), limits);
  ASSERT_FALSE(newer.ok());
  EXPECT_EQ(newer.error().code, Code::kFailedPrecondition);
  EXPECT_NE(newer.error().message.find("protocol version " + std::to_string(kVersion + 1)),
            std::string::npos);
}

TEST(Frames, ExtentsNeverOverflow) {
  EXPECT_TRUE(CheckExtent({0, 100}, 100).ok());
  EXPECT_TRUE(CheckExtent({100, 0}, 100).ok());
  EXPECT_FALSE(CheckExtent({1, 100}, 100).ok());
  EXPECT_FALSE(CheckExtent({101, 0}, 100).ok());
  EXPECT_FALSE(CheckExtent({UINT64_MAX, 2}, 100).ok());
  EXPECT_FALSE(CheckExtent({2, UINT64_MAX}, 100).ok());
  EXPECT_FALSE(CheckExtent({UINT64_MAX - 50, 100}, 100).ok());
}

Json RandomJson(std::mt19937_64& rng, int depth) {
  switch (rng() % (depth > 0 ? 9 : 7)) {
    case 0:
      return nullptr;
    case 1:
      return rng() % 2 == 0;
    case 2:
      return rng() >> (rng() % 64);
    case 3:
      return -static_cast<int64_t>(rng() >> (1 + rng() % 62));
    case 4:
      return 1.0 / double(1 + rng() % 100);
    case 5:
      return float(rng() % 100);
    case 6:
      return std::string(rng() % 300, 'x');
    case 7: {
      Json list = Json::array();
      for (size_t i = rng() % 20; i > 0; --i) list.push_back(RandomJson(rng, depth - 1));
      return list;
    }
    default: {
      Json map = Json::object();
      for (size_t i = rng() % 20; i > 0; --i) {
        map[std::to_string(rng() % 1000)] = RandomJson(rng, depth - 1);
      }
      return map;
    }
  }
}

// The check accepts everything that the library writes, and no truncation of it. Bytes that it
// accepts after random damage can be parsed without deep recursion or allocations beyond the input.
TEST(Frames, ControlPartsUnderDamage) {
  std::mt19937_64 rng(prefixd::testing::Seed("Frames.ControlParts"));
  for (int i = 0; i < 1500; ++i) {
    Json json = {{"a", RandomJson(rng, 4)}, {"b", RandomJson(rng, 2)}};
    std::vector<std::byte> bytes = PackControl(json);
    auto back = UnpackControl(bytes);
    ASSERT_TRUE(back.ok());
    ASSERT_EQ(*back, json);
    ASSERT_FALSE(CheckMsgpack(std::span(bytes).first(rng() % bytes.size()), kMaxControlDepth).ok());
    for (int flips = 1 + int(rng() % 4); flips > 0; --flips) {
      bytes[rng() % bytes.size()] = std::byte(rng());
    }
    (void)UnpackControl(bytes);  // either result is right; it must return
  }
}

TEST(Frames, HostileControlParts) {
  // The hostile inputs are a million nested lists, an array and a string of 4 GiB in six bytes, and
  // bytes after the end.
  EXPECT_FALSE(UnpackControl(std::vector<std::byte>(1 << 20, std::byte{0x91})).ok());
  EXPECT_FALSE(UnpackControl(std::vector<std::byte>(1 << 20, std::byte{0x81})).ok());
  for (uint8_t tag : {0xdd, 0xdf, 0xdb, 0xc6, 0xc1, 0xc7, 0xd8}) {
    std::vector<std::byte> bytes(6, std::byte{0xff});
    bytes[0] = std::byte{tag};
    EXPECT_FALSE(UnpackControl(bytes).ok()) << int(tag);
  }
  EXPECT_FALSE(UnpackControl(std::vector<std::byte>{std::byte{0x80}, std::byte{0x80}}).ok());
  EXPECT_FALSE(UnpackControl(std::vector<std::byte>{std::byte{0x90}}).ok());  // no map
  EXPECT_TRUE(UnpackControl({}).ok());
}

TEST(AddressTest, ParsesAndRefuses) {
  EXPECT_EQ(Address::Parse("unix:/a/b")->path, "/a/b");
  EXPECT_EQ(Address::Parse("/a/b")->ToString(), "unix:/a/b");
  EXPECT_EQ(Address::Parse("tcp:localhost:80")->port, 80);
  EXPECT_EQ(Address::Parse("tcp:[::1]:80")->host, "::1");
  EXPECT_EQ(Address::Parse("tcp:[::1]:80")->ToString(), "tcp:[::1]:80");
  EXPECT_TRUE(Address::Parse(std::string(107, 'x')).ok());
  for (const std::string& bad :
       {std::string(108, 'x'), std::string("tcp:80"), std::string("tcp::80"),
        std::string("tcp:h:x"), std::string("tcp:h:70000"), std::string("tcp:a:b:1"),
        std::string("unix:"), std::string()}) {
    EXPECT_FALSE(Address::Parse(bad).ok()) << bad;
  }
}

TEST(SharedRegionTest, SharesBytesAndIsSealed) {
  auto ours = SharedRegion::Create(1 << 16);
  ASSERT_TRUE(ours.ok());
  auto theirs = SharedRegion::Map(::dup(ours->fd()), 1 << 16);
  ASSERT_TRUE(theirs.ok());
  ours->bytes()[77] = std::byte{42};
  EXPECT_EQ(theirs->bytes()[77], std::byte{42});
  EXPECT_NE(::ftruncate(ours->fd(), 10), 0);
  EXPECT_FALSE(SharedRegion::Map(::dup(ours->fd()), 1 << 20).ok());  // the region is shorter
}

}  // namespace
}  // namespace prefixd::wire
