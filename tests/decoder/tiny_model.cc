#include "tests/decoder/tiny_model.h"

#include <random>

#include "tensors/safetensors.h"
#include "tests/support/files.h"
#include "tests/support/test.h"

namespace prefixd::decoder::testing {
namespace {

constexpr uint32_t kVocab = 264, kHidden = 48, kFfn = 80, kLayers = 3, kQ = 4, kKv = 2, kDh = 16;

void WriteShard(const TinyModel& model, const std::filesystem::path& path, size_t first,
                size_t step) {
  std::vector<TensorToWrite> list;
  size_t i = 0;
  for (const auto& [name, entry] : model.tensors) {
    if (i++ % step != first) continue;
    list.push_back({name, TensorType::kF32, entry.first, std::as_bytes(std::span(entry.second))});
  }
  const Status status = WriteSafetensors(path, list, {{"format", "pt"}});
  ASSERT_TRUE(status.ok()) << status.error().message;
}

}  // namespace

TinyModel TinyModel::Random(const std::string& family, uint64_t seed) {
  TinyModel model;
  const bool qwen = family == "qwen3";
  model.config = {{"model_type", family},         {"vocab_size", kVocab},
                  {"hidden_size", kHidden},       {"intermediate_size", kFfn},
                  {"num_hidden_layers", kLayers}, {"num_attention_heads", kQ},
                  {"num_key_value_heads", kKv},   {"head_dim", kDh},
                  {"hidden_act", "silu"},         {"rms_norm_eps", 1e-5},
                  {"rope_theta", 10000.0},        {"max_position_embeddings", 4096},
                  {"tie_word_embeddings", !qwen}, {"torch_dtype", "bfloat16"},
                  {"bos_token_id", 256},          {"eos_token_id", 257}};
  std::mt19937_64 random(seed);
  const auto add = [&](const std::string& name, std::vector<uint64_t> shape, float spread,
                       float centre) {
    std::normal_distribution<float> normal(centre, spread);
    uint64_t elements = 1;
    for (const uint64_t dim : shape) elements *= dim;
    std::vector<float> values(elements);
    for (float& v : values) v = normal(random);
    model.tensors[name] = {std::move(shape), std::move(values)};
  };
  const auto matrix = [&](const std::string& name, uint64_t rows, uint64_t cols) {
    add(name, {rows, cols}, 1.5f / std::sqrt(float(cols)), 0);
  };
  add("model.embed_tokens.weight", {kVocab, kHidden}, 0.5f, 0);
  add("model.norm.weight", {kHidden}, 0.2f, 1);
  if (qwen) matrix("lm_head.weight", kVocab, kHidden);
  for (uint32_t l = 0; l < kLayers; ++l) {
    const std::string p = "model.layers." + std::to_string(l) + ".";
    add(p + "input_layernorm.weight", {kHidden}, 0.2f, 1);
    add(p + "post_attention_layernorm.weight", {kHidden}, 0.2f, 1);
    matrix(p + "self_attn.q_proj.weight", kQ * kDh, kHidden);
    matrix(p + "self_attn.k_proj.weight", kKv * kDh, kHidden);
    matrix(p + "self_attn.v_proj.weight", kKv * kDh, kHidden);
    matrix(p + "self_attn.o_proj.weight", kHidden, kQ * kDh);
    if (qwen) {
      add(p + "self_attn.q_norm.weight", {kDh}, 0.2f, 1);
      add(p + "self_attn.k_norm.weight", {kDh}, 0.2f, 1);
    }
    matrix(p + "mlp.gate_proj.weight", kFfn, kHidden);
    matrix(p + "mlp.up_proj.weight", kFfn, kHidden);
    matrix(p + "mlp.down_proj.weight", kHidden, kFfn);
  }
  return model;
}

void TinyModel::Write(const std::filesystem::path& directory, int n_shards) const {
  prefixd::testing::WriteFile(directory / "config.json", config.dump(2));
  if (n_shards == 1) {
    WriteShard(*this, directory / "model.safetensors", 0, 1);
    return;
  }
  nlohmann::json map;
  size_t i = 0;
  for (const auto& [name, entry] : tensors) {
    map[name] = "shard-" + std::to_string(i++ % size_t(n_shards)) + ".safetensors";
  }
  for (int shard = 0; shard < n_shards; ++shard) {
    WriteShard(*this, directory / ("shard-" + std::to_string(shard) + ".safetensors"),
               size_t(shard), size_t(n_shards));
  }
  prefixd::testing::WriteFile(directory / "model.safetensors.index.json",
                              nlohmann::json{{"weight_map", map}}.dump());
}

Model TinyModel::Load(const ModelOptions& options) const {
  prefixd::testing::TempDir dir;
  Write(dir.path());
  auto model = Model::Load(dir.path(), options);
  EXPECT_TRUE(model.ok()) << (model.ok() ? "" : model.error().message);
  return std::move(model).value();
}

}  // namespace prefixd::decoder::testing
