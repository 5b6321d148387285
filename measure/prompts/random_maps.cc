#include "measure/prompts/random_maps.h"

#include <cstddef>
#include <map>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "tensors/safetensors.h"

namespace prefixd::bench {

Status WriteRandomMaps(const std::filesystem::path& path, const KvGeometry& geometry,
                       uint32_t length) {
  constexpr uint64_t kWidth = 128;  // d_emb and d_phi
  const uint64_t dim = geometry.key_dim;
  std::mt19937_64 rng(7);
  std::normal_distribution<float> normal(0, 0.05f);
  std::vector<std::vector<float>> data;
  std::vector<TensorToWrite> tensors;
  const auto add = [&](const std::string& name, std::vector<uint64_t> shape) {
    size_t n = 1;
    for (const uint64_t s : shape) n *= s;
    std::vector<float>& values = data.emplace_back(n);
    for (float& x : values) x = normal(rng);
    tensors.push_back({name, TensorType::kF32, std::move(shape), {}});
  };
  for (uint32_t layer = 0; layer < geometry.n_layers; ++layer) {
    for (const auto& [kind, heads] : {std::pair<std::string, uint64_t>{"phi_q", geometry.n_q_heads},
                                      {"phi_k", geometry.n_kv_heads}}) {
      const std::string prefix = "layers." + std::to_string(layer) + "." + kind + ".";
      add(prefix + "W_in", {heads, kWidth, dim});
      for (const char* square : {"W1", "W2", "W_out"}) {
        add(prefix + square, {heads, kWidth, kWidth});
      }
      for (const char* bias : {"b_in", "b1", "b2", "b_out"}) add(prefix + bias, {heads, kWidth});
      add(prefix + "alpha", {heads});
    }
  }
  for (size_t i = 0; i < tensors.size(); ++i) tensors[i].bytes = std::as_bytes(std::span(data[i]));
  const std::map<std::string, std::string> metadata = {
      {"format", "prefixd-phi-v1"},
      {"length", std::to_string(length)},
      {"d_emb", std::to_string(kWidth)},
      {"d_phi", std::to_string(kWidth)},
      {"n_layers", std::to_string(geometry.n_layers)},
      {"n_q_heads", std::to_string(geometry.n_q_heads)},
      {"n_kv_heads", std::to_string(geometry.n_kv_heads)},
      {"head_dim", std::to_string(dim)},
      {"scale", std::to_string(double(geometry.layers[0].scale))}};
  return WriteSafetensors(path, tensors, metadata);
}

}  // namespace prefixd::bench
