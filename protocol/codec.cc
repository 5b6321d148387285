#include "protocol/codec.h"

#include <array>
#include <concepts>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <type_traits>

#include "base/tables/runtime_options.h"
#include "protocol/codec_fields.h"
#include "protocol/msgpack_check.h"

namespace prefixd::wire {
namespace {

// ---- encoding -------------------------------------------------------------------------------

struct Encoder {
  Json json = Json::object();
  template <typename T>
  void operator()(std::string_view key, const T& value) {
    json[key] = Value(value);
  }
  template <typename T>
  void Add(const auto& statistic, const T& value) {
    (*this)(statistic.name, value);
  }
  template <typename T, size_t n>
  void Add(const auto& statistic, const std::array<T, n>& value) {
    Json parts = Json::object();
    for (size_t i = 0; i < n; ++i) parts[statistic.parts[i]] = value[i];
    json[statistic.name] = std::move(parts);
  }

  static Json Value(bool x) { return x; }
  static Json Value(std::integral auto x) { return x; }
  static Json Value(double x) { return x; }
  static Json Value(float x) { return x; }
  static Json Value(const std::string& x) { return x; }
  static Json Value(const std::filesystem::path& x) { return x.string(); }
  static Json Value(DType x) { return std::string(DTypeName(x)); }
  static Json Value(StepMode x) { return std::string(StepModeName(x)); }
  static Json Value(const EstimatorVariant& x) { return x.Name(); }
  static Json Value(IngestState x) { return std::string(IngestStateName(x)); }
  static Json Value(MissReason x) { return std::string(MissReasonName(x)); }
  static Json Value(EstimateSource x) { return std::string(EstimateSourceName(x)); }
  static Json Value(ReuseAdvice x) { return std::string(ReuseAdviceName(x)); }
  static Json Value(RewriteKind x) { return std::string(RewriteKindName(x)); }
  static Json Value(RowEncoding x) { return std::string(RowEncodingName(x)); }
  static Json Value(CutKind x) { return static_cast<uint32_t>(x); }
  static Json Value(const TokenRange& x) { return Json::array({x.begin, x.end}); }
  static Json Value(const Extent& x) { return Json::array({x.offset, x.length}); }
  template <typename T>
  static Json Value(const std::pair<std::string, T>& x) {
    return Json::array({x.first, x.second});
  }
  static Json Value(RuntimeOptions x) {
    Json json = Json::object();
    for (const Option& option : OptionsOf(x)) {
      std::visit([&](const auto& value) { json[option.name] = value; },
                 GetOption(option, OptionForm::kMember));
    }
    return json;
  }
  template <typename T>
  static Json Value(const std::optional<T>& x) {
    return x ? Value(*x) : Json(nullptr);
  }
  template <typename T>
  static Json Value(const std::vector<T>& x) {
    return List(x);
  }
  template <typename T>
  requires requires(Encoder& e, const T& x) { Describe(e, x); }
  static Json Value(const T& x) {
    Encoder nested;
    Describe(nested, x);
    return std::move(nested.json);
  }

 private:
  static Json List(const auto& items) {
    Json list = Json::array();
    for (const auto& item : items) list.push_back(Value(item));
    return list;
  }
};

// ---- decoding -------------------------------------------------------------------------------

// Keeps the first error; after it every further field is skipped.
struct Decoder {
  const Json& json;
  std::string path;
  std::optional<Error>& error;

  template <typename T>
  void operator()(std::string_view key, T& value) {
    if (error) return;
    const auto it = json.find(key);
    if (it != json.end()) Read(*it, path + "." + std::string(key), value);
  }
  template <typename T>
  void Add(const auto& statistic, T& value) {
    (*this)(statistic.name, value);
  }
  // Parts travel by name, so that a peer may know more or fewer of them.
  template <typename T, size_t n>
  void Add(const auto& statistic, std::array<T, n>& value) {
    const auto it = json.find(statistic.name);
    if (error || it == json.end()) return;
    const std::string at = path + "." + std::string(statistic.name);
    if (!it->is_object()) return Fail(at, "an object");
    Decoder parts{*it, at, error};
    for (size_t i = 0; i < n; ++i) parts(statistic.parts[i], value[i]);
  }

  void Fail(const std::string& at, std::string_view expected) {
    if (!error) error = InvalidArgument(at + ": expected " + std::string(expected));
  }

  void Read(const Json& j, const std::string& at, bool& x) {
    j.is_boolean() ? void(x = j.get<bool>()) : Fail(at, "true or false");
  }
  template <std::unsigned_integral T>
  void Read(const Json& j, const std::string& at, T& x) {
    const bool whole = j.is_number_unsigned() || (j.is_number_integer() && j.get<int64_t>() >= 0);
    if (!whole || j.get<uint64_t>() > std::numeric_limits<T>::max()) {
      return Fail(at, "a whole number from 0 to " + std::to_string(std::numeric_limits<T>::max()));
    }
    x = static_cast<T>(j.get<uint64_t>());
  }
  void Read(const Json& j, const std::string& at, int64_t& x) {
    const bool fits = j.is_number_integer() &&
                      !(j.is_number_unsigned() && j.get<uint64_t>() > uint64_t(INT64_MAX));
    fits ? void(x = j.get<int64_t>()) : Fail(at, "a whole number of 64 bits");
  }
  template <std::floating_point T>
  void Read(const Json& j, const std::string& at, T& x) {
    j.is_number() ? void(x = j.get<T>()) : Fail(at, "a number");
  }
  void Read(const Json& j, const std::string& at, std::string& x) {
    j.is_string() ? void(x = j.get_ref<const std::string&>()) : Fail(at, "a string");
  }
  void Read(const Json& j, const std::string& at, std::filesystem::path& x) {
    std::string text;
    Read(j, at, text);
    x = std::move(text);
  }
  template <typename T>
  void ReadName(const Json& j, const std::string& at, Result<T> (*parse)(std::string_view), T& x) {
    std::string name;
    Read(j, at, name);
    if (error) return;
    Result<T> parsed = parse(name);
    if (!parsed.ok()) return void(error = InvalidArgument(at + ": " + parsed.error().message));
    x = *parsed;
  }
  void Read(const Json& j, const std::string& at, DType& x) { ReadName(j, at, DTypeFromName, x); }
  void Read(const Json& j, const std::string& at, StepMode& x) {
    ReadName(j, at, StepModeFromName, x);
  }
  void Read(const Json& j, const std::string& at, EstimatorVariant& x) {
    ReadName(j, at, EstimatorVariant::Parse, x);
  }
  void Read(const Json& j, const std::string& at, RowEncoding& x) {
    ReadName(j, at, RowEncodingFromName, x);
  }
  void Read(const Json& j, const std::string& at, RewriteKind& x) {
    ReadName(j, at, RewriteKindFromName, x);
  }
  void Read(const Json& j, const std::string& at, MissReason& x) {
    std::string name;
    Read(j, at, name);
    for (size_t i = 0; i < kMissReasons; ++i) {
      if (MissReasonName(MissReason(i)) == name) return void(x = MissReason(i));
    }
    Fail(at, "a reason of a miss");
  }
  // A name that a later peer knows is unknown here.
  void Read(const Json& j, const std::string& at, EstimateSource& x) {
    std::string name;
    Read(j, at, name);
    x = EstimateSource::kUnknown;
    for (size_t i = 0; i < kEstimateSources; ++i) {
      if (EstimateSourceName(EstimateSource(i)) == name) x = EstimateSource(i);
    }
  }
  void Read(const Json& j, const std::string& at, ReuseAdvice& x) {
    std::string name;
    Read(j, at, name);
    x = ReuseAdvice::kUnknown;
    for (size_t i = 0; i < kReuseAdvices; ++i) {
      if (ReuseAdviceName(ReuseAdvice(i)) == name) x = ReuseAdvice(i);
    }
  }
  void Read(const Json& j, const std::string& at, IngestState& x) {
    std::string name;
    Read(j, at, name);
    for (auto state : {IngestState::kPending, IngestState::kRunning, IngestState::kReady,
                       IngestState::kFailed, IngestState::kDeferred}) {
      if (IngestStateName(state) == name) return void(x = state);
    }
    Fail(at, "an ingest state");
  }
  void Read(const Json& j, const std::string& at, CutKind& x) {
    uint32_t number = 0;
    Read(j, at, number);
    number <= 2 ? void(x = static_cast<CutKind>(number)) : Fail(at, "a kind of cut (0, 1, 2)");
  }
  template <typename A, typename B>
  void ReadPair(const Json& j, const std::string& at, A& a, B& b) {
    if (!j.is_array() || j.size() != 2) return Fail(at, "a list of two");
    Read(j[0], at, a);
    Read(j[1], at, b);
  }
  void Read(const Json& j, const std::string& at, TokenRange& x) {
    ReadPair(j, at, x.begin, x.end);
  }
  void Read(const Json& j, const std::string& at, Extent& x) {
    ReadPair(j, at, x.offset, x.length);
  }
  template <typename T>
  void Read(const Json& j, const std::string& at, std::pair<std::string, T>& x) {
    ReadPair(j, at, x.first, x.second);
  }
  template <typename T>
  void Read(const Json& j, const std::string& at, std::map<std::string, T>& x) {
    if (!j.is_object()) return Fail(at, "an object");
    x.clear();
    for (const auto& [key, value] : j.items()) Read(value, at + "." + key, x[key]);
  }
  void Read(const Json& j, const std::string& at, RuntimeOptions& x) {
    if (!j.is_object()) return Fail(at, "an object");
    for (const Option& option : OptionsOf(x)) {
      const auto it = j.find(option.name);
      if (error || it == j.end()) continue;
      const std::string shown = at + "." + std::string(option.name);
      OptionValue value = GetOption(option, OptionForm::kMember);
      std::optional<Error> wrong;
      Decoder decoder{*it, shown, wrong};
      std::visit([&](auto& v) { decoder.Read(*it, shown, v); }, value);
      const std::string given = it->dump(-1, ' ', false, Json::error_handler_t::replace);
      const Status set = wrong ? WrongKind(option, OptionForm::kMember, shown, given)
                               : SetOption(option, value, OptionForm::kMember, shown);
      if (!set.ok()) error = set.error();
    }
  }
  template <typename T>
  void Read(const Json& j, const std::string& at, std::optional<T>& x) {
    if (j.is_null()) return x.reset();
    Read(j, at, x.emplace());
  }
  template <typename T>
  void Read(const Json& j, const std::string& at, std::vector<T>& x) {
    if (!j.is_array()) return Fail(at, "a list");
    x.assign(j.size(), T{});
    for (size_t i = 0; i < x.size() && !error; ++i) {
      Read(j[i], at + "[" + std::to_string(i) + "]", x[i]);
    }
  }
  template <typename T>
  requires requires(Decoder& d, T& x) { Describe(d, x); }
  void Read(const Json& j, const std::string& at, T& x) {
    if (!j.is_object()) return Fail(at, "an object");
    Decoder nested{j, at, error};
    Describe(nested, x);
  }
};

}  // namespace

template <typename T>
Json ToJson(const T& value) {
  return Encoder::Value(value);
}

template <typename T>
Result<T> FromJson(const Json& json, std::string_view what) {
  std::optional<Error> error;
  T value{};
  Decoder decoder{json, std::string(what), error};
  decoder.Read(json, std::string(what), value);
  if (error) return *std::move(error);
  return value;
}

Json ErrorToJson(const Error& error) {
  // A message may name what was asked, which may be as long as a request: answers wait in memory.
  size_t end = error.message.size();
  if (end > kMaxErrorBytes) {
    end = kMaxErrorBytes;
    while (end > 0 && (static_cast<unsigned char>(error.message[end]) & 0xC0) == 0x80) --end;
  }
  Json json = {{"code", std::string(CodeName(error.code))},
               {"message", error.message.substr(0, end)}};
  if (error.retry_after_ms > 0) json["retry_after_ms"] = error.retry_after_ms;
  return json;
}

Error ErrorFromJson(const Json& json) {
  const auto code = Field<std::string>(json, "code");
  const auto message = Field<std::string>(json, "message");
  if (!code.ok() || !message.ok()) return {Code::kInternal, "malformed error from the other side"};
  const auto retry = Field<uint32_t>(json, "retry_after_ms");
  return {CodeFromName(*code), *message, retry.ok() ? *retry : 0};
}

template <typename T>
Result<T> Field(const Json& json, const char* key) {
  const auto it = json.find(key);
  if (it == json.end()) return InvalidArgument(std::string("field '") + key + "' is missing");
  return FromJson<T>(*it, key);
}

#define PREFIXD_CODEC(T)             \
  template Json ToJson<T>(const T&); \
  template Result<T> FromJson<T>(const Json&, std::string_view);
PREFIXD_CODEC(Hello)
PREFIXD_CODEC(HelloReply)
PREFIXD_CODEC(ServerStats)
PREFIXD_CODEC(Extent)
PREFIXD_CODEC(KvGeometry)
PREFIXD_CODEC(ModelSpec)
PREFIXD_CODEC(PutSpec)
PREFIXD_CODEC(PersistSpec)
PREFIXD_CODEC(Lifetime)
PREFIXD_CODEC(RuntimeOptions)
PREFIXD_CODEC(MatchSpec)
PREFIXD_CODEC(PrefixMatch)
PREFIXD_CODEC(ExplainSpec)
PREFIXD_CODEC(Explanation)
PREFIXD_CODEC(RewriteResult)
PREFIXD_CODEC(CompressSpec)
PREFIXD_CODEC(CompressReport)
PREFIXD_CODEC(PutResult)
PREFIXD_CODEC(StepPolicy)
PREFIXD_CODEC(AttachSpec)
PREFIXD_CODEC(SessionInfo)
PREFIXD_CODEC(Ledger)
PREFIXD_CODEC(StepInfo)
PREFIXD_CODEC(SessionReport)
PREFIXD_CODEC(PrefixSummary)
PREFIXD_CODEC(PrefixDetail)
PREFIXD_CODEC(HostTierTenant)
PREFIXD_CODEC(MemoryOfKind)
PREFIXD_CODEC(MemoryOfTenant)
PREFIXD_CODEC(TenantStats)
PREFIXD_CODEC(RuntimeStats)
PREFIXD_CODEC(VerifySummary)
PREFIXD_CODEC(TokenRange)
PREFIXD_CODEC(HeadRange)
PREFIXD_CODEC(Selection)
PREFIXD_CODEC(ListSpec)
PREFIXD_CODEC(ModelPage)
PREFIXD_CODEC(PrefixPage)
PREFIXD_CODEC(std::vector<ModelSpec>)
PREFIXD_CODEC(std::vector<PrefixSummary>)
#undef PREFIXD_CODEC

template Result<bool> Field<bool>(const Json&, const char*);
template Result<uint32_t> Field<uint32_t>(const Json&, const char*);
template Result<uint64_t> Field<uint64_t>(const Json&, const char*);
template Result<double> Field<double>(const Json&, const char*);
template Result<std::vector<uint64_t>> Field<std::vector<uint64_t>>(const Json&, const char*);
template Result<std::string> Field<std::string>(const Json&, const char*);
template Result<TokenRange> Field<TokenRange>(const Json&, const char*);
template Result<StepPolicy> Field<StepPolicy>(const Json&, const char*);
template Result<EstimatorVariant> Field<EstimatorVariant>(const Json&, const char*);
template Result<RewriteKind> Field<RewriteKind>(const Json&, const char*);
template Result<std::vector<Extent>> Field<std::vector<Extent>>(const Json&, const char*);

std::vector<std::byte> PackControl(const Json& json) {
  std::vector<uint8_t> packed = Json::to_msgpack(json);
  const auto* data = reinterpret_cast<const std::byte*>(packed.data());
  return {data, data + packed.size()};
}

Result<uint64_t> ControlMemory(std::span<const std::byte> bytes) {
  uint64_t memory = 0;
  PREFIXD_TRY(CheckMsgpack(bytes, kMaxControlDepth, &memory));
  return memory;
}

Result<Json> UnpackControl(std::span<const std::byte> bytes) {
  if (bytes.empty()) return Json(Json::object());
  PREFIXD_TRY(CheckMsgpack(bytes, kMaxControlDepth));
  const auto* data = reinterpret_cast<const uint8_t*>(bytes.data());
  try {
    Json json = Json::from_msgpack(data, data + bytes.size(), true, /*allow_exceptions=*/false);
    if (!json.is_object()) return InvalidArgument("malformed control part: not a map");
    return json;
  } catch (const std::exception&) {  // e.g. a container larger than the parser allows
    return InvalidArgument("malformed control part");
  }
}

std::span<const std::byte> BytesOf(std::span<const uint32_t> values) {
  return std::as_bytes(values);
}
std::span<const std::byte> BytesOf(std::span<const float> values) { return std::as_bytes(values); }
std::span<std::byte> WritableBytesOf(std::span<float> values) {
  return std::as_writable_bytes(values);
}

}  // namespace prefixd::wire
