// Describes the shapes of a model's KV cache.
//
// A *row* is one token of one KV head: its key (key_dim elements, after RoPE and QK-norm)
// immediately followed by its value (value_dim elements), in the model's storage dtype.
//
// Thread-safety: plain values.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "prefixd/dtype.h"
#include "prefixd/head_index.h"
#include "prefixd/result.h"

namespace prefixd {

std::string_view DTypeName(DType dtype);  // "f32", "f16", "bf16"
Result<DType> DTypeFromName(std::string_view name);

// The shape of one row, in elements; value follows key without padding.
struct RowShape {
  uint32_t key_dim = 0;
  uint32_t value_dim = 0;
  DType dtype = DType::kBf16;

  size_t key_bytes() const { return key_dim * DTypeBytes(dtype); }
  size_t value_bytes() const { return value_dim * DTypeBytes(dtype); }
  size_t bytes() const { return key_bytes() + value_bytes(); }
  bool operator==(const RowShape&) const = default;
};

// KV heads [first, first + n), with the query heads of their groups; n 0: to the last. Of a layer
// where a layer is named, and otherwise of a model: of KvGeometry::n_kv_heads, and in a layer that
// has another number of the same share.
struct HeadRange {
  uint32_t first = 0, n = 0;
  bool operator==(const HeadRange&) const = default;
};

// One layer's parameters (docs/mathematics.md). Scores are scale * q.k, softcapped where softcap >
// 0.
struct LayerGeometry {
  float scale = 0;              // usually 1/sqrt(key_dim)
  float softcap = 0;            // 0: none; otherwise exact attention or selection only
  uint32_t sliding_window = 0;  // 0: none; otherwise the engine attends this layer itself
  // Where the layer differs from the model; 0: as KvGeometry says.
  uint32_t n_q_heads = 0, n_kv_heads = 0, key_dim = 0, value_dim = 0;
  bool stored = true;  // false: the layer has no rows here, and no steps
  bool operator==(const LayerGeometry&) const = default;
};

// Heads and dimensions of one layer.
struct LayerShape {
  uint32_t n_q_heads = 0, n_kv_heads = 0;  // both 0: the layer has no rows
  uint32_t key_dim = 0, value_dim = 0;
  DType dtype = DType::kBf16;

  uint32_t group_size() const { return n_kv_heads == 0 ? 0 : n_q_heads / n_kv_heads; }  // G
  RowShape row() const { return {key_dim, value_dim, dtype}; }
  size_t query_floats() const { return size_t{n_q_heads} * key_dim; }  // of one token
  bool operator==(const LayerShape&) const = default;
};

// The KV cache of a whole model. Head counts and dimensions are those of all layers that do not
// name their own.
struct KvGeometry {
  uint32_t n_layers = 0;
  uint32_t n_q_heads = 0;
  uint32_t n_kv_heads = 0;  // divides n_q_heads
  uint32_t key_dim = 0;     // dh
  uint32_t value_dim = 0;   // dv, usually dh
  DType dtype = DType::kBf16;
  std::vector<LayerGeometry> layers;  // n_layers entries

  LayerShape layer(uint32_t l) const {
    const LayerGeometry& own = layers[l];
    if (!own.stored) return {0, 0, 0, 0, dtype};
    const auto or_else = [](uint32_t x, uint32_t models) { return x > 0 ? x : models; };
    return {or_else(own.n_q_heads, n_q_heads), or_else(own.n_kv_heads, n_kv_heads),
            or_else(own.key_dim, key_dim), or_else(own.value_dim, value_dim), dtype};
  }
  RowShape row(uint32_t l) const { return layer(l).row(); }
  uint32_t group_size(uint32_t l) const { return layer(l).group_size(); }
  // Whether all layers have the model's heads and dimensions.
  bool alike() const;
  HeadIndex heads() const;
  // Returns the bytes of one token over all layers and KV heads.
  size_t token_bytes() const;
  // Names the wrong field and its bounds. Limits: 1..1024 layers, heads 1..1024, dims 1..1024, G <=
  // 64, at most kMaxLayerKinds kinds of layers beside the model's own.
  Status Validate() const;
  // Whether they mean the same: a layer may name what is the model's.
  bool operator==(const KvGeometry& other) const;
};

// Layers are of one kind when they have the same KV heads and dimensions.
inline constexpr uint32_t kMaxLayerKinds = 64;

}  // namespace prefixd
