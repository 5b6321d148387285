#include "storage/segment/records.h"

#include <algorithm>
#include <concepts>
#include <cstring>
#include <nlohmann/json.hpp>
#include <type_traits>
#include <utility>

#include "storage/segment/gone_record.h"
#include "storage/segment/row_encoding.h"

namespace prefixd::storage {
namespace {

using nlohmann::json;

// Version 1 lacks the fields added since; it is still read. Models whose layers differ are written
// as version 3, which a prefixd that takes all layers for alike refuses.
constexpr int kRecordVersion = 2, kLayersVersion = 3;

std::string Pack(json value, int version = kRecordVersion) {
  value["v"] = version;
  std::string out;
  json::to_msgpack(value, out);
  return out;
}

// Malformed is thrown for a field of the right type with an impossible value; JSON's own exceptions
// report wrong types.
struct Malformed {};

// The JSON library wraps and rounds numbers that do not fit; here they are malformed.
template <std::integral T>
T Whole(const json& value) {
  if (value.is_number_unsigned()) {
    const auto x = value.get<uint64_t>();
    if (std::in_range<T>(x)) return static_cast<T>(x);
  } else if (value.is_number_integer()) {
    const auto x = value.get<int64_t>();
    if (std::in_range<T>(x)) return static_cast<T>(x);
  }
  throw Malformed{};
}

float Float(const json& value) {
  if (!value.is_number()) throw Malformed{};
  return value.get<float>();
}

// prefixd stores nothing deeper; the JSON library recurses, so deeper bytes would overflow the
// stack.
class DepthCheck final : public json::json_sax_t {
 public:
  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(json::number_integer_t) override { return true; }
  bool number_unsigned(json::number_unsigned_t) override { return true; }
  bool number_float(json::number_float_t, const json::string_t&) override { return true; }
  bool string(json::string_t&) override { return true; }
  bool binary(json::binary_t&) override { return true; }
  bool key(json::string_t&) override { return true; }
  bool start_object(size_t) override { return ++depth_ <= kMaxDepth; }
  bool start_array(size_t) override { return ++depth_ <= kMaxDepth; }
  bool end_object() override { return --depth_, true; }
  bool end_array() override { return --depth_, true; }
  bool parse_error(size_t, const std::string&, const json::exception&) override { return false; }

 private:
  static constexpr int kMaxDepth = 8;
  int depth_ = 0;
};

// Runs `parse` on the decoded object; a field that is missing or of the wrong type is kCorrupt.
template <typename T, typename Parse>
Result<T> Unpack(std::string_view bytes, const char* what, Parse parse) {
  const Error corrupt{Code::kCorrupt, std::string("the stored ") + what + " is malformed"};
  DepthCheck depth;
  if (!json::sax_parse(bytes.begin(), bytes.end(), &depth, json::input_format_t::msgpack)) {
    return corrupt;
  }
  try {
    const json value = json::from_msgpack(bytes.begin(), bytes.end());
    const auto version = Whole<uint32_t>(value.at("v"));
    if (version == 0) return corrupt;
    if (version > kLayersVersion) {
      return Error{Code::kFailedPrecondition,
                   std::string("the stored ") + what + " was written by a newer prefixd"};
    }
    return parse(value);
  } catch (const json::exception&) {
    return corrupt;
  } catch (const Malformed&) {
    return corrupt;
  }
}

json Binary(std::span<const uint8_t> bytes) {
  return json::binary(std::vector<uint8_t>(bytes.begin(), bytes.end()));
}

template <size_t N>
bool GetBinary(const json& value, std::array<uint8_t, N>& out) {
  const auto& bytes = value.get_ref<const json::binary_t&>();
  if (bytes.size() != N) return false;
  std::memcpy(out.data(), bytes.data(), N);
  return true;
}

bool Differs(const LayerGeometry& l) {
  return l != LayerGeometry{l.scale, l.softcap, l.sliding_window};
}

int VersionFor(const ModelRecord& m) {
  return std::ranges::any_of(m.geometry.layers, Differs) ? kLayersVersion : kRecordVersion;
}

json ModelToJson(const ModelRecord& m) {
  json layers = json::array();
  for (const LayerGeometry& l : m.geometry.layers) {
    json layer = {l.scale, l.softcap, l.sliding_window};
    // What differs from the model follows, where something does.
    if (Differs(l)) {
      layer.insert(layer.end(), {l.n_q_heads, l.n_kv_heads, l.key_dim, l.value_dim, l.stored});
    }
    layers.push_back(std::move(layer));
  }
  const KvGeometry& g = m.geometry;
  return {{"name", m.name},
          {"fingerprint", Binary(m.fingerprint.bytes)},
          {"n_layers", g.n_layers},
          {"n_q_heads", g.n_q_heads},
          {"n_kv_heads", g.n_kv_heads},
          {"key_dim", g.key_dim},
          {"value_dim", g.value_dim},
          {"dtype", static_cast<int>(g.dtype)},
          {"layers", std::move(layers)},
          {"description", m.description_json}};
}

Result<ModelRecord> ModelFromJson(const json& v) {
  ModelRecord m;
  m.name = v.at("name").get<std::string>();
  if (!GetBinary(v.at("fingerprint"), m.fingerprint.bytes)) {
    return Error{Code::kCorrupt, "a stored model fingerprint has the wrong length"};
  }
  KvGeometry& g = m.geometry;
  g.n_layers = Whole<uint32_t>(v.at("n_layers"));
  g.n_q_heads = Whole<uint32_t>(v.at("n_q_heads"));
  g.n_kv_heads = Whole<uint32_t>(v.at("n_kv_heads"));
  g.key_dim = Whole<uint32_t>(v.at("key_dim"));
  g.value_dim = Whole<uint32_t>(v.at("value_dim"));
  g.dtype = static_cast<DType>(Whole<std::underlying_type_t<DType>>(v.at("dtype")));
  for (const json& l : v.at("layers")) {
    LayerGeometry& layer = g.layers.emplace_back();
    layer = {Float(l.at(0)), Float(l.at(1)), Whole<uint32_t>(l.at(2))};
    if (l.size() <= 3) continue;
    layer.n_q_heads = Whole<uint32_t>(l.at(3));
    layer.n_kv_heads = Whole<uint32_t>(l.at(4));
    layer.key_dim = Whole<uint32_t>(l.at(5));
    layer.value_dim = Whole<uint32_t>(l.at(6));
    layer.stored = l.at(7).get<bool>();
  }
  m.description_json = v.at("description").get<std::string>();
  if (Status valid = g.Validate(); !valid.ok()) {
    return Error{Code::kCorrupt,
                 "a stored model has an impossible geometry: " + valid.error().message};
  }
  return m;
}

json AliasToJson(const AliasRecord& a) {
  return {{"id", Binary(a.id.bytes)},     {"segment", Binary(a.segment.bytes)},
          {"n_tokens", a.n_tokens},       {"label", a.label},
          {"created", a.created_unix_ms}, {"pinned", a.pinned},
          {"expires", a.expires_unix_ms}};
}

Result<AliasRecord> AliasFromJson(const json& v) {
  AliasRecord a;
  if (!GetBinary(v.at("id"), a.id.bytes) || !GetBinary(v.at("segment"), a.segment.bytes)) {
    return Error{Code::kCorrupt, "a stored alias has an id of the wrong length"};
  }
  a.n_tokens = Whole<uint32_t>(v.at("n_tokens"));
  a.label = v.at("label").get<std::string>();
  a.created_unix_ms = Whole<int64_t>(v.at("created"));
  if (const auto pinned = v.find("pinned"); pinned != v.end()) a.pinned = pinned->get<bool>();
  if (const auto at = v.find("expires"); at != v.end()) a.expires_unix_ms = Whole<int64_t>(*at);
  return a;
}

}  // namespace

std::string EncodeModel(const ModelRecord& model) {
  return Pack(ModelToJson(model), VersionFor(model));
}

Result<ModelRecord> DecodeModel(std::string_view bytes) {
  return Unpack<ModelRecord>(bytes, "model", ModelFromJson);
}

std::string EncodeSegment(const SegmentRecord& r) {
  json value = {{"id", Binary(r.id.bytes)},
                {"file", Binary(r.file)},
                {"sequence", r.sequence},
                {"model", r.model},
                {"tenant", r.tenant},
                {"label", r.label},
                {"parent", Binary(r.parent.bytes)},
                {"begin", r.tokens.begin},
                {"end", r.tokens.end},
                {"first_token", r.first_token},
                {"file_bytes", r.file_bytes},
                {"created", r.created_unix_ms},
                // Stored names never change, whatever the member is called.
                {"settled", r.reclustered},
                {"listed", r.listed},
                {"pinned", r.pinned},
                {"expires", r.expires_unix_ms}};
  if (!r.lead.empty()) value["lead"] = r.lead;
  if (r.encoding != RowEncoding::kAsGiven) {
    value["encoding"] = static_cast<int>(r.encoding);
    value["error"] = {r.encoding_error.key_max, r.encoding_error.key_rms,
                      r.encoding_error.value_max, r.encoding_error.value_rms};
  }
  if (r.lineage != Lineage{}) value["lineage"] = Binary(r.lineage);
  if (r.live) value["live"] = true;
  if (r.compressed()) {
    value["kept"] = r.kept_rows;
    value["full_bytes"] = r.full_bytes;
  }
  return Pack(std::move(value));
}

Result<SegmentRecord> DecodeSegment(std::string_view bytes) {
  return Unpack<SegmentRecord>(bytes, "segment record", [](const json& v) -> Result<SegmentRecord> {
    SegmentRecord r;
    bool ids = GetBinary(v.at("id"), r.id.bytes) && GetBinary(v.at("parent"), r.parent.bytes);
    r.file = r.id.bytes;
    if (Whole<int>(v.at("v")) >= 2) {
      ids = ids && GetBinary(v.at("file"), r.file);
      r.reclustered = v.at("settled").get<bool>();
      r.listed = v.at("listed").get<bool>();
      r.pinned = v.at("pinned").get<bool>();
      r.expires_unix_ms = Whole<int64_t>(v.at("expires"));
    }
    r.sequence = Whole<uint64_t>(v.at("sequence"));
    r.model = v.at("model").get<std::string>();
    r.tenant = v.at("tenant").get<std::string>();
    r.label = v.at("label").get<std::string>();
    r.tokens = {Whole<uint32_t>(v.at("begin")), Whole<uint32_t>(v.at("end"))};
    r.first_token = Whole<uint32_t>(v.at("first_token"));
    r.file_bytes = Whole<uint64_t>(v.at("file_bytes"));
    r.created_unix_ms = Whole<int64_t>(v.at("created"));
    if (const auto lead = v.find("lead"); lead != v.end()) {
      for (const json& token : *lead) r.lead.push_back(Whole<uint32_t>(token));
    }
    if (const auto encoding = v.find("encoding"); encoding != v.end()) {
      const auto number = Whole<uint32_t>(*encoding);
      if (!KnownEncoding(number)) {
        return Error{Code::kFailedPrecondition,
                     "a stored segment is encoded in a way that only a newer prefixd knows"};
      }
      r.encoding = static_cast<RowEncoding>(number);
      const json& e = v.at("error");
      r.encoding_error = {Float(e.at(0)), Float(e.at(1)), Float(e.at(2)), Float(e.at(3))};
    }
    if (const auto lineage = v.find("lineage"); lineage != v.end()) {
      ids = ids && GetBinary(*lineage, r.lineage) && r.lineage != Lineage{};
    }
    r.live = v.value("live", false);
    if (const auto kept = v.find("kept"); kept != v.end()) {
      r.kept_rows = Whole<uint32_t>(*kept);
      r.full_bytes = Whole<uint64_t>(v.at("full_bytes"));
      ids = ids && r.kept_rows > 0 && r.kept_rows < r.tokens.size() && !r.reclustered;
    }
    const bool lead_fits =
        r.lead.empty() || (r.is_root() && r.lead.size() <= r.tokens.size() &&
                           r.lead.size() <= kMaxLeadTokens && r.lead.front() == r.first_token);
    if (!ids || !lead_fits || !Plausible(r.encoding_error) || r.tokens.begin >= r.tokens.end ||
        (r.tokens.begin == 0) != r.is_root()) {
      return Error{Code::kCorrupt, "a stored segment record contradicts itself"};
    }
    return r;
  });
}

std::string EncodeAlias(const AliasRecord& alias) { return Pack(AliasToJson(alias)); }

Result<AliasRecord> DecodeAlias(std::string_view bytes) {
  return Unpack<AliasRecord>(bytes, "alias", AliasFromJson);
}

std::string EncodeGone(const GoneRecord& r) {
  std::vector<uint8_t> blocks;
  for (const BlockHash& hash : r.blocks) blocks.insert(blocks.end(), hash.begin(), hash.end());
  return Pack({{"reason", static_cast<uint32_t>(r.reason)},
               {"tenant", r.tenant},
               {"id", Binary(r.id.bytes)},
               {"begin", r.tokens.begin},
               {"end", r.tokens.end},
               {"at", r.unix_ms},
               {"why", r.why},
               {"blocks", Binary(blocks)}});
}

Result<GoneRecord> DecodeGone(std::string_view bytes) {
  return Unpack<GoneRecord>(bytes, "removal", [](const json& v) -> Result<GoneRecord> {
    GoneRecord r;
    const auto reason = Whole<uint32_t>(v.at("reason"));
    const auto& blocks = v.at("blocks").get_ref<const json::binary_t&>();
    if (!GetBinary(v.at("id"), r.id.bytes) || reason == 0 ||
        reason > static_cast<uint32_t>(GoneReason::kModelRemoved) ||
        blocks.size() % sizeof(BlockHash) != 0 || blocks.size() > kGoneBlocks * sizeof(BlockHash)) {
      return Error{Code::kCorrupt, "a stored removal contradicts itself"};
    }
    r.reason = static_cast<GoneReason>(reason);
    r.tenant = v.at("tenant").get<std::string>();
    r.tokens = {Whole<uint32_t>(v.at("begin")), Whole<uint32_t>(v.at("end"))};
    r.unix_ms = Whole<int64_t>(v.at("at"));
    r.why = v.at("why").get<std::string>();
    r.blocks.resize(blocks.size() / sizeof(BlockHash));
    if (!blocks.empty()) std::memcpy(r.blocks.data(), blocks.data(), blocks.size());
    return r;
  });
}

std::string EncodeManifest(const SegmentManifest& m) {
  json aliases = json::array(), replaces = json::array();
  for (const AliasRecord& alias : m.aliases) aliases.push_back(AliasToJson(alias));
  for (const SegmentId& id : m.replaces) replaces.push_back(Binary(id.bytes));
  json value = {
      {"model", ModelToJson(m.model)},  {"tenant", m.tenant}, {"label", m.label},
      {"block_tokens", m.block_tokens}, {"listed", m.listed}, {"aliases", std::move(aliases)},
      {"replaces", std::move(replaces)}};
  if (m.live) value["live"] = true;
  return Pack(std::move(value), VersionFor(m.model));
}

Result<SegmentManifest> DecodeManifest(std::string_view bytes) {
  return Unpack<SegmentManifest>(
      bytes, "segment manifest", [](const json& v) -> Result<SegmentManifest> {
        SegmentManifest m;
        PREFIXD_ASSIGN(m.model, ModelFromJson(v.at("model")));
        m.tenant = v.at("tenant").get<std::string>();
        m.label = v.at("label").get<std::string>();
        m.block_tokens = Whole<uint32_t>(v.at("block_tokens"));
        if (Whole<int>(v.at("v")) >= 2) {
          for (const json& alias : v.at("aliases")) {
            PREFIXD_ASSIGN(m.aliases.emplace_back(), AliasFromJson(alias));
          }
          m.listed = v.value("listed", true);
          m.live = v.value("live", false);
          for (const json& id : v.value("replaces", json::array())) {
            if (!GetBinary(id, m.replaces.emplace_back().bytes)) {
              return Error{Code::kCorrupt, "a stored manifest has an id of the wrong length"};
            }
          }
        }
        return m;
      });
}

}  // namespace prefixd::storage
