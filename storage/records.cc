#include "storage/records.h"

#include <cstring>
#include <nlohmann/json.hpp>

namespace prefixd::storage {
namespace {

using nlohmann::json;

// Version 1 lacks what was added since; it is still read.
constexpr int kRecordVersion = 2;

std::string Pack(json value) {
  value["v"] = kRecordVersion;
  std::string out;
  json::to_msgpack(value, out);
  return out;
}

// Runs `parse` on the decoded object; whatever is missing or of the wrong type is kCorrupt.
template <typename T, typename Parse>
Result<T> Unpack(std::string_view bytes, const char* what, Parse parse) {
  const Error corrupt{Code::kCorrupt, std::string("the stored ") + what + " is malformed"};
  try {
    const json value = json::from_msgpack(bytes.begin(), bytes.end());
    if (value.at("v").get<int>() > kRecordVersion) {
      return Error{Code::kFailedPrecondition,
                   std::string("the stored ") + what + " was written by a newer prefixd"};
    }
    return parse(value);
  } catch (const json::exception&) {
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

json ModelToJson(const ModelRecord& m) {
  json layers = json::array();
  for (const LayerGeometry& l : m.geometry.layers) {
    layers.push_back({l.scale, l.softcap, l.sliding_window});
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
  g.n_layers = v.at("n_layers").get<uint32_t>();
  g.n_q_heads = v.at("n_q_heads").get<uint32_t>();
  g.n_kv_heads = v.at("n_kv_heads").get<uint32_t>();
  g.key_dim = v.at("key_dim").get<uint32_t>();
  g.value_dim = v.at("value_dim").get<uint32_t>();
  g.dtype = static_cast<DType>(v.at("dtype").get<int>());
  for (const json& l : v.at("layers")) {
    g.layers.push_back({l.at(0).get<float>(), l.at(1).get<float>(), l.at(2).get<uint32_t>()});
  }
  m.description_json = v.at("description").get<std::string>();
  if (Status valid = g.Validate(); !valid.ok()) {
    return Error{Code::kCorrupt,
                 "a stored model has an impossible geometry: " + valid.error().message};
  }
  return m;
}

json AliasToJson(const AliasRecord& a) {
  return {{"id", Binary(a.id.bytes)},
          {"segment", Binary(a.segment.bytes)},
          {"n_tokens", a.n_tokens},
          {"label", a.label},
          {"created", a.created_unix_ms}};
}

Result<AliasRecord> AliasFromJson(const json& v) {
  AliasRecord a;
  if (!GetBinary(v.at("id"), a.id.bytes) || !GetBinary(v.at("segment"), a.segment.bytes)) {
    return Error{Code::kCorrupt, "a stored alias has an id of the wrong length"};
  }
  a.n_tokens = v.at("n_tokens").get<uint32_t>();
  a.label = v.at("label").get<std::string>();
  a.created_unix_ms = v.at("created").get<int64_t>();
  return a;
}

}  // namespace

std::string EncodeModel(const ModelRecord& model) { return Pack(ModelToJson(model)); }

Result<ModelRecord> DecodeModel(std::string_view bytes) {
  return Unpack<ModelRecord>(bytes, "model", ModelFromJson);
}

std::string EncodeSegment(const SegmentRecord& r) {
  return Pack({{"id", Binary(r.id.bytes)},
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
               {"settled", r.settled},
               {"listed", r.listed},
               {"pinned", r.pinned},
               {"expires", r.expires_unix_ms}});
}

Result<SegmentRecord> DecodeSegment(std::string_view bytes) {
  return Unpack<SegmentRecord>(bytes, "segment record", [](const json& v) -> Result<SegmentRecord> {
    SegmentRecord r;
    bool ids = GetBinary(v.at("id"), r.id.bytes) && GetBinary(v.at("parent"), r.parent.bytes);
    r.file = r.id.bytes;
    if (v.at("v").get<int>() >= 2) {
      ids = ids && GetBinary(v.at("file"), r.file);
      r.settled = v.at("settled").get<bool>();
      r.listed = v.at("listed").get<bool>();
      r.pinned = v.at("pinned").get<bool>();
      r.expires_unix_ms = v.at("expires").get<int64_t>();
    }
    r.sequence = v.at("sequence").get<uint64_t>();
    r.model = v.at("model").get<std::string>();
    r.tenant = v.at("tenant").get<std::string>();
    r.label = v.at("label").get<std::string>();
    r.tokens = {v.at("begin").get<uint32_t>(), v.at("end").get<uint32_t>()};
    r.first_token = v.at("first_token").get<uint32_t>();
    r.file_bytes = v.at("file_bytes").get<uint64_t>();
    r.created_unix_ms = v.at("created").get<int64_t>();
    if (!ids || r.tokens.begin >= r.tokens.end || (r.tokens.begin == 0) != r.is_root()) {
      return Error{Code::kCorrupt, "a stored segment record contradicts itself"};
    }
    return r;
  });
}

std::string EncodeAlias(const AliasRecord& alias) { return Pack(AliasToJson(alias)); }

Result<AliasRecord> DecodeAlias(std::string_view bytes) {
  return Unpack<AliasRecord>(bytes, "alias", AliasFromJson);
}

std::string EncodeManifest(const SegmentManifest& m) {
  json aliases = json::array(), replaces = json::array();
  for (const AliasRecord& alias : m.aliases) aliases.push_back(AliasToJson(alias));
  for (const SegmentId& id : m.replaces) replaces.push_back(Binary(id.bytes));
  return Pack({{"model", ModelToJson(m.model)},
               {"tenant", m.tenant},
               {"label", m.label},
               {"block_tokens", m.block_tokens},
               {"listed", m.listed},
               {"aliases", std::move(aliases)},
               {"replaces", std::move(replaces)}});
}

Result<SegmentManifest> DecodeManifest(std::string_view bytes) {
  return Unpack<SegmentManifest>(
      bytes, "segment manifest", [](const json& v) -> Result<SegmentManifest> {
        SegmentManifest m;
        PREFIXD_ASSIGN(m.model, ModelFromJson(v.at("model")));
        m.tenant = v.at("tenant").get<std::string>();
        m.label = v.at("label").get<std::string>();
        m.block_tokens = v.at("block_tokens").get<uint32_t>();
        if (v.at("v").get<int>() >= 2) {
          for (const json& alias : v.at("aliases")) {
            PREFIXD_ASSIGN(m.aliases.emplace_back(), AliasFromJson(alias));
          }
          m.listed = v.value("listed", true);
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
