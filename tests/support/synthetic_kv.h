// Makes keys, values and queries of a prompt, shaped like those of real attention heads: each token
// belongs to a topic (low rank), some channels have large means (outliers), and the first tokens
// are sinks. Keys and queries are rotated by position. Queries are distributed differently from
// keys (a shift of their own) and aim at one topic each.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <vector>

#include "attention/rows/rows.h"
#include "tests/support/random_kv.h"

namespace prefixd::testing {

struct SyntheticPrompt {
  KvGeometry geometry;
  uint32_t n_tokens = 0;
  std::vector<uint32_t> tokens;
  // Each is per layer, in the geometry's dtype: k [n][n_kv_heads][key_dim], v
  // [n][n_kv_heads][value_dim].
  std::vector<std::vector<std::byte>> k, v;
  std::vector<std::vector<float>> q;  // per layer [n][n_q_heads][key_dim]

  // Returns tokens [first, first + n) of one of them.
  std::span<const std::byte> K(uint32_t layer, uint32_t first, uint32_t n) const {
    const size_t token = geometry.layer(layer).n_kv_heads * geometry.row(layer).key_bytes();
    return std::span(k[layer]).subspan(first * token, n * token);
  }
  std::span<const std::byte> V(uint32_t layer, uint32_t first, uint32_t n) const {
    const size_t token = geometry.layer(layer).n_kv_heads * geometry.row(layer).value_bytes();
    return std::span(v[layer]).subspan(first * token, n * token);
  }
  std::span<const float> Q(uint32_t layer, uint32_t first, uint32_t n) const {
    const size_t token = geometry.layer(layer).query_floats();
    if (first > n_tokens || n > n_tokens - first) throw std::out_of_range("queries of no token");
    return std::span(q[layer]).subspan(first * token, n * token);
  }
  // Returns all rows of one head, as the store does.
  std::vector<std::byte> Rows(uint32_t layer, uint32_t kv_head) const {
    const RowShape row = geometry.row(layer);
    std::vector<std::byte> rows(n_tokens * row.bytes());
    for (size_t t = 0; t < n_tokens; ++t) {
      const size_t at = t * geometry.layer(layer).n_kv_heads + kv_head;
      std::copy_n(k[layer].data() + at * row.key_bytes(), row.key_bytes(),
                  rows.data() + t * row.bytes());
      std::copy_n(v[layer].data() + at * row.value_bytes(), row.value_bytes(),
                  rows.data() + t * row.bytes() + row.key_bytes());
    }
    return rows;
  }
};

inline KvGeometry SmallGeometry(uint32_t n_layers, uint32_t n_q_heads, uint32_t n_kv_heads,
                                uint32_t dim, DType dtype = DType::kBf16) {
  KvGeometry geometry;
  geometry.n_layers = n_layers;
  geometry.n_q_heads = n_q_heads;
  geometry.n_kv_heads = n_kv_heads;
  geometry.key_dim = geometry.value_dim = dim;
  geometry.dtype = dtype;
  geometry.layers.assign(n_layers, {1 / std::sqrt(static_cast<float>(dim)), 0, 0});
  return geometry;
}

// Rotates pairs (i, i + dim/2) by position, as RoPE does.
inline void Rotate(std::span<float> x, uint32_t position) {
  const size_t half = x.size() / 2;
  for (size_t i = 0; i < half; ++i) {
    const double frequency = std::pow(10000.0, -2.0 * static_cast<double>(i) / x.size());
    const float c = static_cast<float>(std::cos(position * frequency));
    const float s = static_cast<float>(std::sin(position * frequency));
    const float a = x[i], b = x[i + half];
    x[i] = a * c - b * s;
    x[i + half] = a * s + b * c;
  }
}

// Makes a prompt. The first tokens of two prompts of one seed and geometry agree, rows included, so
// that one can continue the other.
inline SyntheticPrompt MakePrompt(const KvGeometry& geometry, uint32_t n_tokens, uint64_t seed) {
  constexpr uint32_t kTopics = 12;
  SyntheticPrompt prompt{geometry, n_tokens, {}, {}, {}, {}};
  Random random(seed);
  std::vector<uint32_t> topic_of;
  for (uint32_t t = 0; t < n_tokens; ++t) {
    prompt.tokens.push_back(random.Int(0, 31999));
    topic_of.push_back(random.Int(0, kTopics - 1));
  }
  for (uint32_t l = 0; l < geometry.n_layers; ++l) {
    const LayerShape shape = geometry.layer(l);
    if (shape.n_kv_heads == 0) {
      prompt.k.emplace_back(), prompt.v.emplace_back(), prompt.q.emplace_back();
      continue;
    }
    const uint32_t dim = shape.key_dim, value_dim = shape.value_dim;
    Random of_layer(seed * 1000003 + l);
    const auto topic_k = of_layer.Normals(size_t{kTopics} * shape.n_kv_heads * dim);
    const auto topic_v = of_layer.Normals(size_t{kTopics} * shape.n_kv_heads * value_dim);
    const auto shift = of_layer.Normals(size_t{shape.n_q_heads} * dim, 0.3f);
    const uint32_t outlier = of_layer.Int(0, dim - 1);
    std::vector<float> k, v, q;
    for (uint32_t t = 0; t < n_tokens; ++t) {
      for (uint32_t h = 0; h < shape.n_kv_heads; ++h) {
        const size_t topic = size_t{topic_of[t]} * shape.n_kv_heads + h;
        auto key = of_layer.Normals(dim, 0.6f), value = of_layer.Normals(value_dim, 0.7f);
        for (uint32_t i = 0; i < dim; ++i) key[i] += topic_k[topic * dim + i];
        for (uint32_t i = 0; i < value_dim; ++i) value[i] += topic_v[topic * value_dim + i];
        key[outlier] += t < 4 ? 8.0f : 3.0f;
        Rotate(key, t);
        k.insert(k.end(), key.begin(), key.end());
        v.insert(v.end(), value.begin(), value.end());
      }
      const uint32_t wanted = of_layer.Int(0, kTopics - 1);
      for (uint32_t h = 0; h < shape.n_q_heads; ++h) {
        auto query = of_layer.Normals(dim, 0.5f);
        const size_t topic = (size_t{wanted} * shape.n_kv_heads + h / shape.group_size()) * dim;
        for (uint32_t i = 0; i < dim; ++i) query[i] += topic_k[topic + i] + shift[h * dim + i];
        Rotate(query, t);
        q.insert(q.end(), query.begin(), query.end());
      }
    }
    const auto stored = [&](const std::vector<float>& x) {
      std::vector<std::byte> bytes(x.size() * DTypeBytes(geometry.dtype));
      FromFloat(geometry.dtype, x, bytes.data());
      return bytes;
    };
    prompt.k.push_back(stored(k));
    prompt.v.push_back(stored(v));
    prompt.q.push_back(std::move(q));
  }
  return prompt;
}

// Makes a branch: the first n tokens of `prompt`, then the tokens of `other` from position n on.
inline SyntheticPrompt Branch(const SyntheticPrompt& prompt, uint32_t n,
                              const SyntheticPrompt& other) {
  SyntheticPrompt out = other;
  const auto take = [](auto& to, const auto& from, size_t count) {
    std::copy_n(from.begin(), count, to.begin());
  };
  take(out.tokens, prompt.tokens, n);
  if (n < out.n_tokens && n < prompt.n_tokens && out.tokens[n] == prompt.tokens[n]) {
    out.tokens[n] ^= 1;  // the prompts differ from here on
  }
  for (uint32_t l = 0; l < out.geometry.n_layers; ++l) {
    take(out.k[l], prompt.k[l], prompt.K(l, 0, n).size());
    take(out.v[l], prompt.v[l], prompt.V(l, 0, n).size());
    take(out.q[l], prompt.q[l], prompt.Q(l, 0, n).size());
  }
  return out;
}

}  // namespace prefixd::testing
