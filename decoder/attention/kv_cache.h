// Keeps keys and values of consecutive tokens in memory, for the decoder's own attention.
//
// Rows are rounded to the geometry's dtype when stored and kept in float32, so that attention here
// sees exactly what a stored prefix would hold. Thread-safety: any thread may call const methods
// while no thread appends.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "prefixd/kv_shape.h"
#include "prefixd/result.h"

namespace prefixd::decoder {

class KvCache {
 public:
  explicit KvCache(const KvGeometry& geometry);

  const KvGeometry& geometry() const { return geometry_; }
  // Returns the tokens of one layer; without a layer, the smallest number that any layer has.
  uint32_t size(uint32_t layer) const { return sizes_[layer]; }
  uint32_t size() const;

  // Appends n tokens of a layer: k [n][n_kv_heads][key_dim], v [n][n_kv_heads][value_dim].
  void Append(uint32_t layer, uint32_t n, std::span<const float> k, std::span<const float> v);
  // Forgets all tokens from number n_tokens on, in every layer.
  void Truncate(uint32_t n_tokens);

  // Return the contiguous rows of one KV head: [size(layer)][key_dim] and [size(layer)][value_dim].
  // They are valid until the next Append or Truncate.
  std::span<const float> keys(uint32_t layer, uint32_t kv_head) const;
  std::span<const float> values(uint32_t layer, uint32_t kv_head) const;

  // Writes tokens [first, first + n) as PutStream::Write takes them, in the geometry's dtype:
  //   k: n * n_kv_heads * key_bytes, v: n * n_kv_heads * value_bytes.
  // kInvalidArgument when the tokens are not there or a buffer has another size.
  Status Export(uint32_t layer, uint32_t first, uint32_t n, std::span<std::byte> k,
                std::span<std::byte> v) const;

 private:
  std::vector<float>& Slot(std::vector<std::vector<float>>& of, uint32_t layer, uint32_t head) {
    return of[size_t{layer} * geometry_.n_kv_heads + head];
  }

  KvGeometry geometry_;
  std::vector<uint32_t> sizes_;                    // [n_layers]
  std::vector<std::vector<float>> keys_, values_;  // [n_layers * n_kv_heads], rows of one head
};

}  // namespace prefixd::decoder
