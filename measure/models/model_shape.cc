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

}  // namespace

KvGeometry ModelShape::Geometry(uint32_t layers) const {
  KvGeometry g{layers, n_q_heads, n_kv_heads, head_dim, head_dim, dtype, {}};
  g.layers.assign(layers, {.scale = 1.0f / std::sqrt(float(head_dim))});
  return g;
}

double ModelShape::PrefillFlops(uint64_t n) const {
  const double queries = double(n_q_heads) * head_dim, keys = double(n_kv_heads) * head_dim;
  const double weights = double(hidden) * (2 * queries + 2 * keys + 3.0 * ffn);
  const double pairs = double(n) * (double(n) + 1) / 2;
  return n_layers * (2 * weights * double(n) + 4 * queries * pairs);
}

const std::vector<ModelShape>& KnownModels() {
  static const std::vector<ModelShape> models = {
      {"SmolLM2-135M", 30, 576, 1536, 9, 3, 64, DType::kBf16},
      {"Llama-3.2-1B", 16, 2048, 8192, 32, 8, 64, DType::kBf16},
      {"Llama-3.1-8B", 32, 4096, 14336, 32, 8, 128, DType::kBf16},
      {"Llama-3.1-70B", 80, 8192, 28672, 64, 8, 128, DType::kBf16},
      {"Qwen3-8B", 36, 4096, 12288, 32, 8, 128, DType::kBf16},
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
  PREFIXD_ASSIGN(m.ffn, Count(object, label, "intermediate_size", kMaxWidth, 4 * m.hidden));
  PREFIXD_ASSIGN(m.n_q_heads, Count(object, label, "num_attention_heads", 1024));
  PREFIXD_ASSIGN(m.n_kv_heads,
                 Count(object, label, "num_key_value_heads", m.n_q_heads, m.n_q_heads));
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
