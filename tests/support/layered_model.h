// Provides a model whose layers differ, and each of its layers as a model of one layer: what a
// layer answers must not depend on the others.
#pragma once

#include <cmath>
#include <string>

#include "prefixd/kv_shape.h"
#include "prefixd/model.h"
#include "tests/support/synthetic_kv.h"

namespace prefixd::testing {

inline constexpr uint32_t kUnstoredLayer = 2;

// Five layers: as the model's, with more heads, without rows, with other dimensions, and with both.
// All that are stored have whole heads of each half of the model's two.
inline KvGeometry LayeredGeometry(DType dtype = DType::kBf16) {
  KvGeometry g = SmallGeometry(5, 4, 2, 16, dtype);
  const auto differ = [&](uint32_t l, LayerShape own) {
    LayerGeometry& layer = g.layers[l];
    layer.n_q_heads = own.n_q_heads;
    layer.n_kv_heads = own.n_kv_heads;
    layer.key_dim = own.key_dim;
    layer.value_dim = own.value_dim;
    if (own.key_dim > 0) layer.scale = 1 / std::sqrt(static_cast<float>(own.key_dim));
  };
  differ(1, {12, 4, 0, 0});
  g.layers[kUnstoredLayer].stored = false;
  differ(3, {0, 0, 32, 24});
  differ(4, {6, 6, 24, 20});
  return g;
}

// Layer `l` alone, of a prompt of many.
inline SyntheticPrompt LayerAlone(const SyntheticPrompt& prompt, uint32_t l) {
  const LayerShape own = prompt.geometry.layer(l);
  KvGeometry g = SmallGeometry(1, own.n_q_heads, own.n_kv_heads, own.key_dim, own.dtype);
  g.value_dim = own.value_dim;
  g.layers[0].scale = prompt.geometry.layers[l].scale;
  return {g, prompt.n_tokens, prompt.tokens, {prompt.k[l]}, {prompt.v[l]}, {prompt.q[l]}};
}

inline ModelSpec ModelOfLayer(const SyntheticPrompt& alone, uint32_t l) {
  return {"layer-" + std::to_string(l), alone.geometry, {{"layer", std::to_string(l)}}, {}};
}

}  // namespace prefixd::testing
