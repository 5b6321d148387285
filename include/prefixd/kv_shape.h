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

// KV heads [first, first + n) of a model, with the query heads of their groups; n 0: to the last.
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
  bool operator==(const LayerGeometry&) const = default;
};

// The KV cache of a whole model. All layers share head counts and dimensions.
struct KvGeometry {
  uint32_t n_layers = 0;
  uint32_t n_q_heads = 0;
  uint32_t n_kv_heads = 0;  // divides n_q_heads
  uint32_t key_dim = 0;     // dh
  uint32_t value_dim = 0;   // dv, usually dh
  DType dtype = DType::kBf16;
  std::vector<LayerGeometry> layers;  // n_layers entries

  uint32_t group_size() const { return n_q_heads / n_kv_heads; }  // G
  RowShape row() const { return {key_dim, value_dim, dtype}; }
  // Returns the bytes of one token over all layers and KV heads.
  size_t token_bytes() const { return size_t{n_layers} * n_kv_heads * row().bytes(); }
  // Names the wrong field and its bounds. Limits: 1..1024 layers, heads 1..1024, dims 1..1024, G <=
  // 64.
  Status Validate() const;
  bool operator==(const KvGeometry&) const = default;
};

}  // namespace prefixd
