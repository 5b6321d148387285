#include "client_lib/codec.h"

#include <array>
#include <concepts>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <type_traits>

#include "client_lib/msgpack_check.h"
#include "runtime/store.h"

namespace prefixd::wire {
namespace {

// Matches T and const T, so that one description serves encoding and decoding.
template <typename T, typename U>
concept Is = std::same_as<std::remove_const_t<T>, U>;

template <class V>
void Describe(V& v, Is<Hello> auto& s) {
  v("client", s.client), v("tenant", s.tenant), v("token", s.token);
  v("admin", s.admin), v("shared_memory", s.shared_memory);
}
template <class V>
void Describe(V& v, Is<HelloReply> auto& s) {
  v("server", s.server), v("pid", s.pid), v("max_payload_bytes", s.max_payload_bytes);
  v("max_calls", s.max_calls), v("region_bytes", s.region_bytes), v("admin", s.admin);
}
template <class V>
void Describe(V& v, Is<ServerStats> auto& s) {
  v("version", s.version), v("address", s.address), v("dir", s.dir), v("pid", s.pid);
  v("uptime_ms", s.uptime_ms), v("connections", s.connections);
  v("connections_total", s.connections_total), v("connections_refused", s.connections_refused);
  v("calls", s.calls), v("calls_failed", s.calls_failed);
  v("protocol_errors", s.protocol_errors), v("bytes_in", s.bytes_in);
  v("bytes_out", s.bytes_out), v("shared_memory_bytes", s.shared_memory_bytes);
}
template <class V>
void Describe(V& v, Is<LayerGeometry> auto& s) {
  v("scale", s.scale), v("softcap", s.softcap), v("sliding_window", s.sliding_window);
}
template <class V>
void Describe(V& v, Is<KvGeometry> auto& s) {
  v("n_layers", s.n_layers), v("n_q_heads", s.n_q_heads), v("n_kv_heads", s.n_kv_heads);
  v("key_dim", s.key_dim), v("value_dim", s.value_dim), v("dtype", s.dtype);
  v("layers", s.layers);
}
template <class V>
void Describe(V& v, Is<ModelSpec> auto& s) {
  v("name", s.name), v("geometry", s.geometry), v("identity", s.identity);
  v("feature_maps", s.feature_maps);
}
template <class V>
void Describe(V& v, Is<storage::EncodingError> auto& s) {
  v("key_max", s.key_max), v("key_rms", s.key_rms);
  v("value_max", s.value_max), v("value_rms", s.value_rms);
}
template <class V>
void Describe(V& v, Is<storage::StoredPart> auto& s) {
  v("tokens", s.tokens), v("encoding", s.encoding), v("chunk_tokens", s.chunk_tokens);
}
template <class V>
void Describe(V& v, Is<PutSpec> auto& s) {
  v("model", s.model), v("tenant", s.tenant), v("label", s.label);
  v("pinned", s.pinned), v("ttl_seconds", s.ttl_seconds), v("encoding", s.encoding);
}
template <class V>
void Describe(V& v, Is<RuntimeOptions> auto& s) {
  v("dir", s.dir), v("io", s.io), v("host_tier_bytes", s.host_tier_bytes);
  v("host_tier_shares", s.host_tier_shares), v("host_tier_hugetlb", s.host_tier_hugetlb);
  v("host_tier_mlock", s.host_tier_mlock), v("pin_host_tier", s.pin_host_tier);
  v("min_free_bytes", s.min_free_bytes), v("read_deadline_ms", s.read_deadline_ms);
  v("quota_bytes", s.quota_bytes), v("tenant_quota_bytes", s.tenant_quota_bytes);
  v("tenant_quotas", s.tenant_quotas), v("evict", s.evict), v("maintenance_ms", s.maintenance_ms);
  v("threads", s.threads), v("compute", s.compute), v("anchors", s.anchors);
  v("checkpoint_tokens", s.checkpoint_tokens), v("estimators", s.estimators);
  v("clusters", s.clusters), v("phi_features", s.phi_features), v("encoding", s.encoding);
  v("query_samples", s.query_samples), v("choice_budgets", s.choice_budgets);
  v("build_codes", s.build_codes), v("codes_min_tokens", s.codes_min_tokens);
  v("build_ivf", s.build_ivf), v("ivf_min_tokens", s.ivf_min_tokens), v("settle", s.settle);
  v("settle_min_tokens", s.settle_min_tokens), v("settle_chunk_tokens", s.settle_chunk_tokens);
  v("merge_max_tokens", s.merge_max_tokens), v("max_sessions", s.max_sessions);
  v("scrub_bytes_per_second", s.scrub_bytes_per_second);
  v("scrub_interval_hours", s.scrub_interval_hours);
}
template <class V>
void Describe(V& v, Is<Retention> auto& s) {
  v("pinned", s.pinned), v("ttl_seconds", s.ttl_seconds);
}
template <class V>
void Describe(V& v, Is<PrefixMatch> auto& s) {
  v("prefix", s.prefix), v("n_tokens", s.n_tokens), v("stored_tokens", s.stored_tokens);
}
template <class V>
void Describe(V& v, Is<PutResult> auto& s) {
  v("prefix", s.prefix), v("n_tokens", s.n_tokens), v("stored_tokens", s.stored_tokens);
  v("bytes", s.bytes), v("seconds", s.seconds);
  v("encoding", s.encoding), v("encoding_error", s.encoding_error);
}
template <class V>
void Describe(V& v, Is<StepPolicy> auto& s) {
  v("mode", s.mode), v("estimator", s.estimator), v("budget", s.budget), v("k", s.k);
  v("l_gen", s.l_gen), v("selector", s.selector), v("page_granular", s.page_granular);
  v("adaptive", s.adaptive), v("report_missing", s.report_missing), v("fixed", s.fixed);
}
template <class V>
void Describe(V& v, Is<StepPolicy::Fixed> auto& s) {
  v("layer", s.layer), v("kv_head", s.kv_head), v("estimator", s.estimator);
}
template <class V>
void Describe(V& v, Is<AttachSpec> auto& s) {
  v("model", s.model), v("tenant", s.tenant), v("prefix", s.prefix), v("n_tokens", s.n_tokens);
  v("policy", s.policy);
}
template <class V>
void Describe(V& v, Is<Anchors> auto& s) {
  v("n_sink", s.n_sink), v("n_tail", s.n_tail);
}
template <class V>
void Describe(V& v, Is<SessionInfo> auto& s) {
  v("id", s.id), v("model", s.model), v("tenant", s.tenant), v("prefix", s.prefix);
  v("n_tokens", s.n_tokens), v("geometry", s.geometry), v("anchors", s.anchors);
  v("estimator", s.estimator), v("d_phi", s.d_phi), v("attach_seconds", s.attach_seconds);
  v("parts", s.parts);
}
template <class V>
void Describe(V& v, Is<Ledger> auto& s) {
  v("steps", s.steps), v("anchor_tokens", s.anchor_tokens);
  v("retrieved_tokens", s.retrieved_tokens), v("summary_tokens", s.summary_tokens);
  v("charged_summary_tokens", s.charged_summary_tokens);
  v("logical_bytes", s.logical_bytes), v("physical_bytes", s.physical_bytes);
  v("summary_bytes", s.summary_bytes), v("feature_tokens", s.feature_tokens);
  v("feature_bytes", s.feature_bytes);
  v("keys_scanned", s.keys_scanned), v("scan_bytes", s.scan_bytes);
  v("retrievals", s.retrievals), v("rho_z_sum", s.rho_z_sum), v("rho_z_count", s.rho_z_count);
  v("select_ns", s.select_ns), v("read_ns", s.read_ns), v("compute_ns", s.compute_ns);
}
template <class V>
void Describe(V& v, Is<StepInfo> auto& s) {
  v("k", s.k), v("ledger", s.ledger), v("k_per_head", s.k_per_head);
  v("rho_z", s.rho_z), v("missing", s.missing);
}
template <class V>
void Describe(V& v, Is<MissingMass> auto& s) {
  v("delta", s.delta), v("certified", s.certified);
}
template <class V>
void Describe(V& v, Is<SessionReport> auto& s) {
  v("info", s.info), v("total", s.total), v("per_head", s.per_head);
}
template <class V>
void Describe(V& v, Is<HeadChoice> auto& s) {
  v("layer", s.layer), v("kv_head", s.kv_head), v("chosen", s.chosen), v("budget", s.budget);
  v("errors", s.errors);
}
template <class V>
void Describe(V& v, Is<EstimatorError> auto& s) {
  v("estimator", s.estimator), v("error", s.error);
}
template <class V>
void Describe(V& v, Is<PrefixSummary> auto& s) {
  v("id", s.id), v("model", s.model), v("tenant", s.tenant), v("label", s.label);
  v("n_tokens", s.n_tokens), v("own_tokens", s.own_tokens), v("children", s.children);
  v("own_bytes", s.own_bytes), v("created_unix_ms", s.created_unix_ms);
  v("last_used_unix_ms", s.last_used_unix_ms), v("quarantined", s.quarantined);
  v("settled", s.settled), v("pinned", s.pinned), v("expires_unix_ms", s.expires_unix_ms);
  v("quarantine", s.quarantine);
  v("ingest", s.ingest), v("ingest_error", s.ingest_error);
  v("encoding", s.encoding), v("encoding_error", s.encoding_error);
}
template <class V>
void Describe(V& v, Is<PrefixDetail> auto& s) {
  v("summary", s.summary), v("chain", s.chain), v("blobs", s.blobs), v("choices", s.choices);
}
template <class V>
void Describe(V& v, Is<HostTierTenant> auto& s) {
  v("tenant", s.tenant), v("bytes", s.bytes), v("memory_bytes", s.memory_bytes);
  v("share_bytes", s.share_bytes), v("pinned_bytes", s.pinned_bytes), v("hits", s.hits);
  v("misses", s.misses), v("evictions", s.evictions);
}
template <class V>
void Describe(V& v, Is<TenantStats> auto& s) {
  v("tenant", s.tenant), v("bytes", s.bytes), v("reserved_bytes", s.reserved_bytes);
  v("quota_bytes", s.quota_bytes), v("evictions", s.evictions);
  v("evicted_bytes", s.evicted_bytes);
}
template <class V>
void Describe(V& v, Is<RuntimeStats> auto& s) {
  v("version", s.version), v("compute", s.compute), v("io_backend", s.io_backend);
  v("uptime_ms", s.uptime_ms), v("models", s.models), v("prefixes", s.prefixes);
  v("sessions", s.sessions), v("sessions_total", s.sessions_total), v("steps", s.steps);
  v("bytes_on_disk", s.bytes_on_disk), v("bytes_free", s.bytes_free);
  v("bytes_written", s.bytes_written), v("bytes_read", s.bytes_read);
  v("host_tier_bytes", s.host_tier_bytes), v("host_tier_capacity", s.host_tier_capacity);
  v("host_hits", s.host_hits), v("host_misses", s.host_misses);
  v("checksum_failures", s.checksum_failures), v("puts", s.puts);
  v("puts_aborted", s.puts_aborted), v("ingest_queue", s.ingest_queue);
  v("bytes_rewritten", s.bytes_rewritten), v("settled", s.settled), v("merged", s.merged);
  v("rewrite_queue", s.rewrite_queue);
  v("host_tier_pinned", s.host_tier_pinned), v("host_evictions", s.host_evictions);
  v("host_tier_huge_pages", s.host_tier_huge_pages), v("host_tier_gpu", s.host_tier_gpu);
  v("host_tenants", s.host_tenants);
  v("quota_bytes", s.quota_bytes), v("evictions", s.evictions);
  v("evicted_bytes", s.evicted_bytes), v("expired", s.expired), v("tenants", s.tenants);
  v("scrub_bytes", s.scrub_bytes), v("scrub_damaged", s.scrub_damaged);
  v("verified_since_unix_ms", s.verified_since_unix_ms);
}
template <class V>
void Describe(V& v, Is<VerifySummary> auto& s) {
  v("segments", s.segments), v("pages", s.pages), v("blobs", s.blobs), v("bytes", s.bytes);
  v("damaged", s.damaged);
}
template <class V>
void Describe(V& v, Is<Cut> auto& s) {
  v("score", s.score), v("kind", s.kind);
}
template <class V>
void Describe(V& v, Is<Selection> auto& s) {
  v("cuts", s.cuts), v("keys_scanned", s.keys_scanned), v("bytes_scanned", s.bytes_scanned);
}

// ---- encoding -------------------------------------------------------------------------------

struct Encoder {
  Json json = Json::object();
  template <typename T>
  void operator()(const char* key, const T& value) {
    json[key] = Value(value);
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
  static Json Value(storage::RowEncoding x) { return std::string(storage::RowEncodingName(x)); }
  static Json Value(CutKind x) { return static_cast<uint32_t>(x); }
  static Json Value(const TokenRange& x) { return Json::array({x.begin, x.end}); }
  static Json Value(const Extent& x) { return Json::array({x.offset, x.length}); }
  template <typename T>
  static Json Value(const std::pair<std::string, T>& x) {
    return Json::array({x.first, x.second});
  }
  static Json Value(const std::map<std::string, uint64_t>& x) { return x; }
  template <typename T>
  static Json Value(const std::optional<T>& x) {
    return x ? Value(*x) : Json(nullptr);
  }
  template <typename T, size_t n>
  static Json Value(const std::array<T, n>& x) {
    return List(x);
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
  void operator()(const char* key, T& value) {
    if (error) return;
    const auto it = json.find(key);
    if (it != json.end()) Read(*it, path + "." + key, value);
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
  void Read(const Json& j, const std::string& at, storage::RowEncoding& x) {
    ReadName(j, at, storage::RowEncodingFromName, x);
  }
  void Read(const Json& j, const std::string& at, IngestState& x) {
    std::string name;
    Read(j, at, name);
    for (auto state : {IngestState::kPending, IngestState::kRunning, IngestState::kReady,
                       IngestState::kFailed}) {
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
  void Read(const Json& j, const std::string& at, std::map<std::string, uint64_t>& x) {
    if (!j.is_object()) return Fail(at, "an object");
    for (const auto& [key, value] : j.items()) Read(value, at + "." + key, x[key]);
  }
  template <typename T>
  void Read(const Json& j, const std::string& at, std::optional<T>& x) {
    if (j.is_null()) return x.reset();
    Read(j, at, x.emplace());
  }
  template <typename T, size_t n>
  void Read(const Json& j, const std::string& at, std::array<T, n>& x) {
    if (!j.is_array() || j.size() != n) return Fail(at, "a list of " + std::to_string(n));
    for (size_t i = 0; i < n; ++i) Read(j[i], at, x[i]);
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
  return {{"code", std::string(CodeName(error.code))}, {"message", error.message}};
}

Error ErrorFromJson(const Json& json) {
  const auto code = Field<std::string>(json, "code");
  const auto message = Field<std::string>(json, "message");
  if (!code.ok() || !message.ok()) return {Code::kInternal, "malformed error from the other side"};
  return {CodeFromName(*code), *message};
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
PREFIXD_CODEC(Retention)
PREFIXD_CODEC(RuntimeOptions)
PREFIXD_CODEC(PrefixMatch)
PREFIXD_CODEC(PutResult)
PREFIXD_CODEC(StepPolicy)
PREFIXD_CODEC(AttachSpec)
PREFIXD_CODEC(SessionInfo)
PREFIXD_CODEC(Ledger)
PREFIXD_CODEC(StepInfo)
PREFIXD_CODEC(SessionReport)
PREFIXD_CODEC(PrefixSummary)
PREFIXD_CODEC(PrefixDetail)
PREFIXD_CODEC(RuntimeStats)
PREFIXD_CODEC(VerifySummary)
PREFIXD_CODEC(TokenRange)
PREFIXD_CODEC(Selection)
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
template Result<std::vector<Extent>> Field<std::vector<Extent>>(const Json&, const char*);

std::vector<std::byte> PackControl(const Json& json) {
  std::vector<uint8_t> packed = Json::to_msgpack(json);
  const auto* data = reinterpret_cast<const std::byte*>(packed.data());
  return {data, data + packed.size()};
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
