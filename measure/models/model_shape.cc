#include "measure/models/model_shape.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>

namespace prefixd::bench {
namespace {

using nlohmann::json;

std::string Lower(std::string_view text) {
  std::string out(text);
  std::ranges::transform(out, out.begin(), [](unsigned char c) { return std::tolower(c); });
  return out;
}

// Reads a whole number from 1 to `max`; `fallback` where it is absent, and 0 means that it must be
// there.
Result<uint32_t> Count(const json& object, const std::string& label, const char* key, uint32_t max,
                       uint32_t fallback = 0) {
  const auto it = object.find(key);
  if (it == object.end() || it->is_null()) {
    if (fallback > 0) return fallback;
    return Error{Code::kInvalidArgument,
                 label + ": has no " + key + "; it is not a model's config.json"};
  }
  if (!it->is_number_unsigned() || it->get<uint64_t>() < 1 || it->get<uint64_t>() > max) {
    return Error{Code::kInvalidArgument,
                 label + ": " + key + " must be a whole number from 1 to " + std::to_string(max)};
  }
  return static_cast<uint32_t>(it->get<uint64_t>());
}

bool Has(const json& object, const char* key) {
  const auto it = object.find(key);
  return it != object.end() && !it->is_null();
}
bool IsTrue(const json& object, const char* key) {
  const auto it = object.find(key);
  return it != object.end() && it->is_boolean() && it->get<bool>();
}

// Counts the layers with a sliding window among `n_layers`. kInvalidArgument: layers that keep no
// keys and values of all tokens.
Result<uint32_t> SlidingLayers(const json& object, const std::string& label, uint32_t n_layers) {
  const auto refuse = [&](const std::string& what) {
    return Error{Code::kInvalidArgument, label + ": " + what};
  };
  if (Has(object, "kv_lora_rank")) {
    return refuse(
        "kv_lora_rank says that keys and values are compressed into one vector (MLA), which "
        "prefixd does not store");
  }
  // Families that are partly recurrent name their layers by one of these.
  for (const char* key : {"layers_block_type", "hybrid_override_pattern", "attn_layer_period",
                          "attn_layer_indices", "block_types", "full_attention_interval"}) {
    if (Has(object, key)) {
      return refuse(std::string(key) +
                    " says that some layers are recurrent: they keep no keys and values");
    }
  }
  if (Has(object, "layer_types")) {
    uint32_t sliding = 0;
    for (const json& type : object["layer_types"]) {
      const std::string name = type.is_string() ? type.get<std::string>() : "";
      if (name == "full_attention") continue;
      if (name != "sliding_attention") {
        return refuse("layer_types has '" + name +
                      "'; full_attention and sliding_attention can be measured");
      }
      ++sliding;
    }
    return sliding;
  }
  const auto window = object.find("use_sliding_window");
  const bool off = window != object.end() && window->is_boolean() && !window->get<bool>();
  return Has(object, "sliding_window") && !off ? n_layers : 0;
}

// Families have their own names for heads that share keys and values.
Result<uint32_t> KvHeads(const json& object, const std::string& label, uint32_t n_q_heads) {
  const char* key = "num_key_value_heads";
  if (!Has(object, key)) {
    if (IsTrue(object, "multi_query") && !IsTrue(object, "new_decoder_architecture")) return 1;
    key = IsTrue(object, "multi_query_attention") ? "multi_query_group_num" : "num_kv_heads";
  }
  return Count(object, label, key, n_q_heads, n_q_heads);
}

// The width that a token goes through: of a mixture, of the experts that are chosen and of those
// that all tokens share.
Result<uint32_t> FeedForward(const json& object, const std::string& label, uint32_t hidden,
                             uint32_t max) {
  PREFIXD_ASSIGN(const uint32_t dense, Count(object, label, "intermediate_size", max, 4 * hidden));
  if (!Has(object, "num_experts_per_tok")) return dense;
  PREFIXD_ASSIGN(const uint32_t chosen, Count(object, label, "num_experts_per_tok", 1024));
  PREFIXD_ASSIGN(const uint32_t width, Count(object, label, "moe_intermediate_size", max, dense));
  uint32_t shared = 0;
  if (Has(object, "shared_expert_intermediate_size")) {
    PREFIXD_ASSIGN(shared, Count(object, label, "shared_expert_intermediate_size", max));
  }
  return chosen * width + shared;
}

}  // namespace

KvGeometry ModelShape::Geometry(uint32_t layers) const {
  KvGeometry g{layers, n_q_heads, n_kv_heads, head_dim, head_dim, dtype, {}};
  g.layers.assign(layers, {.scale = 1.0f / std::sqrt(float(head_dim))});
  return g;
}

double ModelShape::PrefillFlops(double tokens, double squares) const {
  const double queries = double(n_q_heads) * head_dim, keys = double(n_kv_heads) * head_dim;
  const double weights = double(hidden) * (2 * queries + 2 * keys + 3.0 * ffn);
  const double pairs = (squares + tokens) / 2;
  return n_layers * (2 * weights * tokens + 4 * queries * pairs);
}

const std::vector<ModelShape>& KnownModels() {
  static const std::vector<ModelShape> models = {
      {"SmolLM2-135M", 30, 576, 1536, 9, 3, 64, DType::kBf16, {}},
      {"Llama-3.2-1B", 16, 2048, 8192, 32, 8, 64, DType::kBf16, {}},
      {"Llama-3.1-8B", 32, 4096, 14336, 32, 8, 128, DType::kBf16, {}},
      {"Llama-3.1-70B", 80, 8192, 28672, 64, 8, 128, DType::kBf16, {}},
      {"Qwen3-8B", 36, 4096, 12288, 32, 8, 128, DType::kBf16, {}},
  };
  return models;
}

Result<ModelShape> ParseModelShape(std::string_view text, const std::string& label) {
  json object = json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!object.is_object()) {
    return Error{Code::kInvalidArgument, label + ": is not a JSON object"};
  }
  // Models that see pictures, too, keep the language model's settings below this key.
  if (object.contains("text_config") && object["text_config"].is_object()) {
    object = json(object["text_config"]);
  }
  constexpr uint32_t kMaxWidth = 1 << 20;
  ModelShape m;
  m.name = label;
  PREFIXD_ASSIGN(m.n_layers, Count(object, label, "num_hidden_layers", 1024));
  PREFIXD_ASSIGN(m.hidden, Count(object, label, "hidden_size", kMaxWidth));
  PREFIXD_ASSIGN(m.ffn, FeedForward(object, label, m.hidden, kMaxWidth));
  PREFIXD_ASSIGN(m.n_q_heads, Count(object, label, "num_attention_heads", 1024));
  PREFIXD_ASSIGN(m.n_kv_heads, KvHeads(object, label, m.n_q_heads));
  PREFIXD_ASSIGN(const uint32_t sliding, SlidingLayers(object, label, m.n_layers));
  if (sliding > 0) {
    m.notes.push_back(std::to_string(sliding) + " of " + std::to_string(m.n_layers) +
                      " layers have a sliding window and are counted as full: they keep and read "
                      "less than is said here");
  }
  PREFIXD_ASSIGN(m.head_dim,
                 Count(object, label, "head_dim", 1024, std::max(1u, m.hidden / m.n_q_heads)));
  std::string dtype = "bfloat16";
  for (const char* key : {"torch_dtype", "dtype"}) {
    if (object.contains(key) && object[key].is_string()) dtype = object[key].get<std::string>();
  }
  if (dtype != "bfloat16" && dtype != "float16" && dtype != "float32") {
    return Error{Code::kInvalidArgument,
                 label + ": dtype '" + dtype + "' is not one of bfloat16, float16, float32"};
  }
  m.dtype = dtype == "float32" ? DType::kF32 : dtype == "float16" ? DType::kF16 : DType::kBf16;
  const Status valid = m.Geometry().Validate();
  if (!valid.ok()) return Error{Code::kInvalidArgument, label + ": " + valid.error().message};
  return m;
}

Result<ModelShape> ModelShapeOf(std::string_view name_or_path) {
  for (const ModelShape& known : KnownModels()) {
    if (Lower(known.name) == Lower(name_or_path)) return known;
  }
  std::filesystem::path path(name_or_path);
  std::error_code ec;
  if (std::filesystem::is_directory(path, ec)) path /= "config.json";
  std::ifstream in(path, std::ios::binary);
  if (!in) {
    std::string names;
    for (const ModelShape& known : KnownModels()) names += known.name + ", ";
    return Error{Code::kNotFound, "'" + std::string(name_or_path) +
                                      "' is no model that is known (" + names +
                                      "...) and no config.json that can be read"};
  }
  const std::string text{std::istreambuf_iterator<char>(in), {}};
  return ParseModelShape(text, path.string());
}

}  // namespace prefixd::bench
