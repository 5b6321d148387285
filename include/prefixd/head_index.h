// Numbers the KV heads of a model: those of layer 0 first, then those of layer 1, and so on. What
// is kept for each head lies in this order, and so do a session's ledgers
// (SessionReport::per_head).
//
// Thread-safety: plain value.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace prefixd {

class HeadIndex {
 public:
  HeadIndex() = default;
  // All layers have so many heads.
  HeadIndex(uint32_t n_layers, uint32_t n_heads) : n_layers_(n_layers), n_heads_(n_heads) {}
  // heads: of each layer; a layer may have none.
  explicit HeadIndex(std::span<const uint32_t> heads)
      : n_layers_(static_cast<uint32_t>(heads.size())) {
    first_.reserve(heads.size() + 1);
    first_.push_back(0);
    for (const uint32_t n : heads) first_.push_back(first_.back() + n);
  }

  uint32_t layers() const { return n_layers_; }
  size_t count() const { return first_.empty() ? size_t{n_layers_} * n_heads_ : first_.back(); }
  uint32_t heads_in(uint32_t layer) const {
    return first_.empty() ? n_heads_ : static_cast<uint32_t>(first_[layer + 1] - first_[layer]);
  }
  // The number of a layer's head.
  size_t of(uint32_t layer, uint32_t head) const {
    return (first_.empty() ? size_t{layer} * n_heads_ : first_[layer]) + head;
  }
  // The layer, and the head in it, of a number below count().
  uint32_t layer_of(size_t index) const {
    if (first_.empty()) return static_cast<uint32_t>(index / n_heads_);
    return static_cast<uint32_t>(std::ranges::upper_bound(first_, index) - first_.begin() - 1);
  }
  uint32_t head_of(size_t index) const {
    if (first_.empty()) return static_cast<uint32_t>(index % n_heads_);
    return static_cast<uint32_t>(index - first_[layer_of(index)]);
  }

 private:
  uint32_t n_layers_ = 0, n_heads_ = 0;
  std::vector<size_t> first_;  // [layers + 1]; empty: all layers have n_heads_
};

}  // namespace prefixd
