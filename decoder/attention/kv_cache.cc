#include "decoder/attention/kv_cache.h"

#include <algorithm>
#include <string>

#include "attention/rows/rows.h"

namespace prefixd::decoder {
namespace {

// Appends src [n][heads][dim] float32 to the rows of one head, rounded to `dtype`.
void AppendHead(DType dtype, std::span<const float> src, uint32_t n, uint32_t heads, uint32_t head,
                uint32_t dim, std::vector<float>& rows) {
  std::vector<std::byte> stored(dim * DTypeBytes(dtype));
  const size_t begin = rows.size();
  rows.resize(begin + size_t{n} * dim);
  for (uint32_t i = 0; i < n; ++i) {
    const auto row = src.subspan((size_t{i} * heads + head) * dim, dim);
    FromFloat(dtype, row, stored.data());
    ToFloat(dtype, stored.data(), std::span(rows).subspan(begin + size_t{i} * dim, dim));
  }
}

}  // namespace

KvCache::KvCache(const KvGeometry& geometry)
    : geometry_(geometry),
      sizes_(geometry.n_layers, 0),
      keys_(size_t{geometry.n_layers} * geometry.n_kv_heads),
      values_(keys_.size()) {}

uint32_t KvCache::size() const {
  return sizes_.empty() ? 0 : *std::min_element(sizes_.begin(), sizes_.end());
}

void KvCache::Append(uint32_t layer, uint32_t n, std::span<const float> k,
                     std::span<const float> v) {
  for (uint32_t h = 0; h < geometry_.n_kv_heads; ++h) {
    AppendHead(geometry_.dtype, k, n, geometry_.n_kv_heads, h, geometry_.key_dim,
               Slot(keys_, layer, h));
    AppendHead(geometry_.dtype, v, n, geometry_.n_kv_heads, h, geometry_.value_dim,
               Slot(values_, layer, h));
  }
  sizes_[layer] += n;
}

void KvCache::Truncate(uint32_t n_tokens) {
  for (uint32_t l = 0; l < geometry_.n_layers; ++l) {
    sizes_[l] = std::min(sizes_[l], n_tokens);
    for (uint32_t h = 0; h < geometry_.n_kv_heads; ++h) {
      Slot(keys_, l, h).resize(size_t{sizes_[l]} * geometry_.key_dim);
      Slot(values_, l, h).resize(size_t{sizes_[l]} * geometry_.value_dim);
    }
  }
}

std::span<const float> KvCache::keys(uint32_t layer, uint32_t kv_head) const {
  return keys_[size_t{layer} * geometry_.n_kv_heads + kv_head];
}

std::span<const float> KvCache::values(uint32_t layer, uint32_t kv_head) const {
  return values_[size_t{layer} * geometry_.n_kv_heads + kv_head];
}

Status KvCache::Export(uint32_t layer, uint32_t first, uint32_t n, std::span<std::byte> k,
                       std::span<std::byte> v) const {
  const RowShape row = geometry_.row(0);
  const uint32_t heads = geometry_.n_kv_heads;
  if (layer >= geometry_.n_layers || first > sizes_[layer] || n > sizes_[layer] - first) {
    return InvalidArgument("KV cache: tokens [" + std::to_string(first) + ", " +
                           std::to_string(uint64_t{first} + n) + ") of layer " +
                           std::to_string(layer) + " are not there");
  }
  if (k.size() != n * heads * row.key_bytes() || v.size() != n * heads * row.value_bytes()) {
    return InvalidArgument("KV cache: a buffer for " + std::to_string(n) +
                           " tokens has the wrong size");
  }
  for (uint32_t i = 0; i < n; ++i) {
    for (uint32_t h = 0; h < heads; ++h) {
      const size_t out = size_t{i} * heads + h, token = size_t{first} + i;
      FromFloat(row.dtype, keys(layer, h).subspan(token * row.key_dim, row.key_dim),
                k.data() + out * row.key_bytes());
      FromFloat(row.dtype, values(layer, h).subspan(token * row.value_dim, row.value_dim),
                v.data() + out * row.value_bytes());
    }
  }
  return {};
}

}  // namespace prefixd::decoder
