// Tests the codec: round trips of every type, and which field is wrong.
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <string>

#include "base/tables/statistics.h"
#include "prefixd/explain.h"
#include "prefixd/kv_shape.h"
#include "prefixd/lists.h"
#include "prefixd/match.h"
#include "prefixd/model.h"
#include "prefixd/policy.h"
#include "prefixd/prefix_summary.h"
#include "prefixd/put.h"
#include "prefixd/rewrite.h"
#include "prefixd/session_info.h"
#include "prefixd/verify.h"
#include "protocol/codec.h"
#include "protocol/frame.h"
#include "tests/support/test.h"

namespace prefixd::wire {
namespace {

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
         {"none", "phi/per_feature/bf16", "moment", "moment/r8/cov", "scan", "auto"}) {
      const EstimatorVariant e = *EstimatorVariant::Parse(name);
      StepPolicy p{mode, e, 0.037, std::nullopt, 9, "ivf"};
      EXPECT_EQ(RoundTrip(p), p);
      p.k = 0;
      p.adaptive = p.report_missing = true;
      p.spread = false;
      p.retain = {.tokens = 300, .by = "gkv"};
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
  l.summary_bytes = {1, 2, 3, 4, 5};
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
  EXPECT_EQ(ledger->summary_bytes, (std::array<uint64_t, kEstimatorKinds>{0, 0, 5, 0, 0}));
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

// Answers wait in memory, and some name what was asked.
TEST(Codec, LongErrorsAreCutBetweenCharacters) {
  const std::string euro = "\xE2\x82\xAC";
  std::string message = "x";
  while (message.size() < (1u << 20)) message += euro;
  const std::string cut = ErrorFromJson(ErrorToJson({Code::kNotFound, message})).message;
  EXPECT_LE(cut.size(), wire::kMaxErrorBytes);
  EXPECT_GT(cut.size() + euro.size(), wire::kMaxErrorBytes);
  EXPECT_EQ(cut.size() % euro.size(), 1u);
  EXPECT_EQ(message.compare(0, cut.size(), cut), 0);
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
  RoundTrip(PersistSpec{"label", true, 60, RowEncoding::kInt8, 100, true, true});
  RoundTrip(MatchSpec{"m", "t", {}, true, "ab"});
  RoundTrip(ExplainSpec{{"m", "t", {}, true, "ab"}, {{"weights", "w"}}});
  Explanation why{{"id", 10, 12, 9}, 20, {}};
  for (size_t reason = 0; reason < kMissReasons; ++reason) {
    why.misses.push_back(
        {MissReason(reason), "text", 12, "id", "m", 1, {{"rope", "a", "b"}}, 1, 2});
  }
  EXPECT_EQ(RoundTrip(why).misses.back().reason, MissReason::kCompressed);
  RoundTrip(RewriteResult{3, 2, 4096, {"it is open"}});
  PutResult done{"id", 10, 5, 1 << 20, 0.25};
  done.exact_tokens = 8, done.lineage = "ab";
  RoundTrip(done);
  RoundTrip(PrefixMatch{"id", 10, 12, 9});
  RoundTrip(MatchSpec{"m", "t", {}, true, "ab", {1234.5, 16, 200}});
  PrefixMatch match{"id", 10, 12, 9};
  for (size_t source = 0; source < kEstimateSources; ++source) {
    for (size_t advice = 0; advice < kReuseAdvices; ++advice) {
      const TimeEstimate time{0.25, EstimateSource(source)};
      match.estimate = {10, 1 << 20, 2 << 20, time, time, time, 99.5, ReuseAdvice(advice)};
      EXPECT_EQ(RoundTrip(match).estimate, match.estimate);
    }
  }
  // Of a later peer.
  Json later = ToJson(match);
  later["estimate"]["advice"] = "buy";
  later["estimate"]["restore"]["source"] = "oracle";
  const auto read = FromJson<PrefixMatch>(later, "match");
  ASSERT_TRUE(read.ok()) << read.error().message;
  EXPECT_EQ(read->estimate.advice, ReuseAdvice::kUnknown);
  EXPECT_FALSE(read->estimate.restore.known());
  later.erase("estimate");  // of an earlier one
  EXPECT_EQ(FromJson<PrefixMatch>(later, "match").value().estimate, ReuseEstimate());
  RoundTrip(SessionReport{{}, {}, std::vector<Ledger>(3)});
  RoundTrip(VerifySummary{1, 2, 3, 4, {"a", "b"}, {"c"}, {"d"}});
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
  EXPECT_EQ(sharing->sharing, (StepPolicy::Sharing{16, 0.9, 1, false}));
  EXPECT_FALSE(sharing->prefetch.on());
  const auto ahead = FromJson<StepPolicy>(Json{{"prefetch", {{"forward", 4}}}}, "p");
  ASSERT_TRUE(ahead.ok());
  EXPECT_EQ(ahead->prefetch, (StepPolicy::Prefetch{4, 0, 64}));
  StepPolicy narrow;
  narrow.sharing = {8, 0.75, 2, true};
  narrow.prefetch = {4, 1, 7};
  EXPECT_EQ(RoundTrip(narrow), narrow);
  EXPECT_FALSE(FromJson<StepPolicy>(Json{{"sharing", {{"block", -1}}}}, "p").ok());
}

}  // namespace
}  // namespace prefixd::wire
