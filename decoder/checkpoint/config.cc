#include "decoder/checkpoint/config.h"

#include <cmath>
#include <nlohmann/json.hpp>

#include "decoder/checkpoint/json_file.h"
#include "tensors/safetensors_header.h"

namespace prefixd::decoder {
namespace {

using nlohmann::json;

// Reads typed members of one JSON object; errors name the key.
class Fields {
 public:
  Fields(const json& object, std::string label) : object_(object), label_(std::move(label)) {}

  Error Refuse(const std::string& what) const { return InvalidArgument(label_ + ": " + what); }

  // Returns nullptr when the key is absent or null: both mean the same in these files.
  const json* Find(const char* key) const {
    const auto it = object_.find(key);
    return it == object_.end() || it->is_null() ? nullptr : &*it;
  }

  Result<uint32_t> Count(const char* key, uint32_t max,
                         std::optional<uint32_t> fallback = std::nullopt) const {
    const json* value = Find(key);
    if (value == nullptr) {
      if (fallback) return *fallback;
      return Refuse("has no " + std::string(key) + "; it is not a complete model configuration");
    }
    if (!value->is_number_unsigned() || value->get<uint64_t>() < 1 ||
        value->get<uint64_t>() > max) {
      return Refuse(std::string(key) + " must be a whole number from 1 to " + std::to_string(max));
    }
    return static_cast<uint32_t>(value->get<uint64_t>());
  }

  Result<double> Positive(const char* key, std::optional<double> fallback = std::nullopt) const {
    const json* value = Find(key);
    if (value == nullptr) {
      if (fallback) return *fallback;
      return Refuse("has no " + std::string(key) + "; it is not a complete model configuration");
    }
    const double number = value->is_number() ? value->get<double>() : 0.0;
    if (!(number > 0) || !std::isfinite(number)) {
      return Refuse(std::string(key) + " must be a positive number");
    }
    return number;
  }

  Result<bool> Flag(const char* key, bool fallback) const {
    const json* value = Find(key);
    if (value == nullptr) return fallback;
    if (!value->is_boolean()) return Refuse(std::string(key) + " must be true or false");
    return value->get<bool>();
  }

  Result<std::string> Text(const char* key, const char* fallback) const {
    const json* value = Find(key);
    if (value == nullptr) return std::string(fallback);
    if (!value->is_string()) return Refuse(std::string(key) + " must be a string");
    return value->get<std::string>();
  }

 private:
  const json& object_;
  std::string label_;
};

constexpr uint32_t kMaxVocab = 1 << 24, kMaxWidth = 1 << 20, kMaxHeads = 1024;
constexpr uint32_t kMaxPositions = 1u << 31;

Result<RopeType> RopeTypeOf(const Fields& fields) {
  // Older files write "type", newer ones "rope_type".
  PREFIXD_ASSIGN(const std::string old_name, fields.Text("type", "default"));
  PREFIXD_ASSIGN(const std::string name, fields.Text("rope_type", old_name.c_str()));
  if (name == "default") return RopeType::kDefault;
  if (name == "linear") return RopeType::kLinear;
  if (name == "llama3") return RopeType::kLlama3;
  if (name == "dynamic" || name == "longrope") {
    return fields.Refuse("RoPE type '" + name +
                         "' changes keys with the current length, so they cannot be stored");
  }
  return fields.Refuse("RoPE type " + QuoteName(name) +
                       " is not supported; default, linear and llama3 are");
}

// Reads RoPE from "rope_parameters" (newer), or from "rope_scaling" beside "rope_theta".
Result<RopeConfig> ParseRopeObject(const json& object, double theta, const std::string& label) {
  const Fields fields(object, label);
  for (const auto& [key, value] : object.items()) {
    if (value.is_object()) {
      return fields.Refuse("different RoPE per kind of layer (" + QuoteName(key) +
                           ") is not supported");
    }
  }
  RopeConfig rope;
  PREFIXD_ASSIGN(rope.type, RopeTypeOf(fields));
  PREFIXD_ASSIGN(rope.theta, fields.Positive("rope_theta", theta));
  PREFIXD_ASSIGN(const double rotary, fields.Positive("partial_rotary_factor", 1.0));
  if (rotary != 1.0) return fields.Refuse("partial_rotary_factor other than 1 is not supported");
  if (rope.type == RopeType::kDefault) return rope;
  PREFIXD_ASSIGN(rope.factor, fields.Positive("factor"));
  if (rope.type == RopeType::kLinear) return rope;
  PREFIXD_ASSIGN(rope.low_freq_factor, fields.Positive("low_freq_factor"));
  PREFIXD_ASSIGN(rope.high_freq_factor, fields.Positive("high_freq_factor"));
  PREFIXD_ASSIGN(rope.original_max_positions,
                 fields.Count("original_max_position_embeddings", kMaxPositions));
  if (rope.high_freq_factor <= rope.low_freq_factor) {
    return fields.Refuse("high_freq_factor must be greater than low_freq_factor");
  }
  return rope;
}

Result<RopeConfig> ParseRope(const Fields& fields, const std::string& label) {
  PREFIXD_ASSIGN(const double theta, fields.Positive("rope_theta", 10000.0));
  for (const char* key : {"rope_parameters", "rope_scaling"}) {
    const json* object = fields.Find(key);
    if (object == nullptr) continue;
    if (!object->is_object()) return fields.Refuse(std::string(key) + " must be an object");
    PREFIXD_ASSIGN(const RopeConfig rope, ParseRopeObject(*object, theta, label + ": " + key));
    if (fields.Find("rope_theta") != nullptr && rope.theta != theta) {
      return fields.Refuse("rope_theta is given twice, with different values");
    }
    return rope;
  }
  RopeConfig rope;
  rope.theta = theta;
  return rope;
}

Status RefuseUnsupported(const Fields& fields) {
  for (const char* key : {"attention_bias", "mlp_bias", "use_sliding_window"}) {
    PREFIXD_ASSIGN(const bool on, fields.Flag(key, false));
    if (on) return fields.Refuse(std::string(key) + " is not supported");
  }
  // Qwen3 files may contain a window that use_sliding_window switches off.
  if (fields.Find("sliding_window") != nullptr && fields.Find("use_sliding_window") == nullptr) {
    return fields.Refuse("sliding_window is not supported: such layers are the engine's own");
  }
  if (const json* types = fields.Find("layer_types")) {
    if (!types->is_array()) return fields.Refuse("layer_types must be a list");
    for (const json& type : *types) {
      if (type != "full_attention") {
        return fields.Refuse("layer_types other than full_attention are not supported");
      }
    }
  }
  if (fields.Find("quantization_config") != nullptr) {
    return fields.Refuse(
        "quantised weights are not supported; use the F32, F16 or BF16 checkpoint");
  }
  PREFIXD_ASSIGN(const std::string activation, fields.Text("hidden_act", "silu"));
  if (activation != "silu" && activation != "swish") {
    return fields.Refuse("hidden_act " + QuoteName(activation) + " is not supported; silu is");
  }
  PREFIXD_ASSIGN(const double rotary, fields.Positive("partial_rotary_factor", 1.0));
  if (rotary != 1.0) return fields.Refuse("partial_rotary_factor other than 1 is not supported");
  return {};
}

Result<std::vector<uint32_t>> TokenIds(const Fields& fields, const char* key, uint32_t vocab_size) {
  const json* value = fields.Find(key);
  std::vector<uint32_t> ids;
  if (value == nullptr) return ids;
  const json list = value->is_array() ? *value : json::array({*value});
  for (const json& id : list) {
    if (!id.is_number_unsigned() || id.get<uint64_t>() >= vocab_size) {
      return fields.Refuse(std::string(key) + " is not a token of the vocabulary");
    }
    ids.push_back(static_cast<uint32_t>(id.get<uint64_t>()));
  }
  return ids;
}

Result<DType> CheckpointDType(const Fields& fields) {
  PREFIXD_ASSIGN(const std::string old_name, fields.Text("torch_dtype", "bfloat16"));
  PREFIXD_ASSIGN(const std::string name, fields.Text("dtype", old_name.c_str()));
  if (name == "bfloat16") return DType::kBf16;
  if (name == "float16") return DType::kF16;
  if (name == "float32") return DType::kF32;
  return fields.Refuse("dtype " + QuoteName(name) +
                       " is not supported; float32, float16 and bfloat16 are");
}

}  // namespace

std::string_view RopeTypeName(RopeType type) {
  switch (type) {
    case RopeType::kLinear:
      return "linear";
    case RopeType::kLlama3:
      return "llama3";
    case RopeType::kDefault:
      break;
  }
  return "default";
}

Result<ModelConfig> ParseConfig(std::string_view text, std::string_view label_view) {
  const std::string label(label_view);
  PREFIXD_ASSIGN(const json object, ParseJsonObject(text, label));
  const Fields fields(object, label);
  ModelConfig config;
  PREFIXD_ASSIGN(const std::string model_type, fields.Text("model_type", ""));
  if (model_type == "llama") {
    config.family = Family::kLlama;
  } else if (model_type == "qwen3") {
    config.family = Family::kQwen3;
  } else {
    return fields.Refuse("model_type " + QuoteName(model_type) +
                         " is not supported; llama and qwen3 are");
  }
  config.qk_norm = config.family == Family::kQwen3;
  PREFIXD_TRY(RefuseUnsupported(fields));

  PREFIXD_ASSIGN(config.vocab_size, fields.Count("vocab_size", kMaxVocab));
  PREFIXD_ASSIGN(config.hidden, fields.Count("hidden_size", kMaxWidth));
  PREFIXD_ASSIGN(config.ffn, fields.Count("intermediate_size", kMaxWidth));
  PREFIXD_ASSIGN(config.n_layers, fields.Count("num_hidden_layers", 1024));
  PREFIXD_ASSIGN(config.n_q_heads, fields.Count("num_attention_heads", kMaxHeads));
  PREFIXD_ASSIGN(config.n_kv_heads,
                 fields.Count("num_key_value_heads", kMaxHeads, config.n_q_heads));
  // An absent head_dim has Hugging Face's default: 128 in Qwen3, hidden / heads in Llama.
  if (fields.Find("head_dim") == nullptr && config.family == Family::kLlama &&
      config.hidden % config.n_q_heads != 0) {
    return fields.Refuse("num_attention_heads does not divide hidden_size and head_dim is absent");
  }
  PREFIXD_ASSIGN(
      config.head_dim,
      fields.Count("head_dim", 1024,
                   config.family == Family::kQwen3 ? 128 : config.hidden / config.n_q_heads));
  if (config.head_dim % 2 != 0) return fields.Refuse("head_dim must be even for RoPE");
  if (config.n_q_heads % config.n_kv_heads != 0) {
    return fields.Refuse("num_key_value_heads " + std::to_string(config.n_kv_heads) +
                         " does not divide num_attention_heads " +
                         std::to_string(config.n_q_heads));
  }
  PREFIXD_ASSIGN(const double eps, fields.Positive("rms_norm_eps", 1e-6));
  config.norm_eps = static_cast<float>(eps);
  PREFIXD_ASSIGN(config.max_positions,
                 fields.Count("max_position_embeddings", kMaxPositions,
                              config.family == Family::kQwen3 ? 32768 : 2048));
  PREFIXD_ASSIGN(config.tied_embeddings, fields.Flag("tie_word_embeddings", false));
  PREFIXD_ASSIGN(config.rope, ParseRope(fields, label));
  PREFIXD_ASSIGN(config.dtype, CheckpointDType(fields));
  PREFIXD_ASSIGN(config.eos, TokenIds(fields, "eos_token_id", config.vocab_size));
  PREFIXD_ASSIGN(const auto bos, TokenIds(fields, "bos_token_id", config.vocab_size));
  if (!bos.empty()) config.bos = bos.front();
  if (Status valid = GeometryOf(config, config.dtype).Validate(); !valid.ok()) {
    return fields.Refuse(valid.error().message);
  }
  return config;
}

Result<ModelConfig> LoadConfig(const std::filesystem::path& directory) {
  const std::filesystem::path path = directory / "config.json";
  PREFIXD_ASSIGN(const std::string text, ReadTextFile(path));
  return ParseConfig(text, path.string());
}

KvGeometry GeometryOf(const ModelConfig& config, DType dtype) {
  KvGeometry geometry;
  geometry.n_layers = config.n_layers;
  geometry.n_q_heads = config.n_q_heads;
  geometry.n_kv_heads = config.n_kv_heads;
  geometry.key_dim = config.head_dim;
  geometry.value_dim = config.head_dim;
  geometry.dtype = dtype;
  LayerGeometry layer;
  layer.scale = 1.0f / std::sqrt(static_cast<float>(config.head_dim));
  geometry.layers.assign(config.n_layers, layer);
  return geometry;
}

}  // namespace prefixd::decoder
