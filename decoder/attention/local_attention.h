// The default backend keeps all keys and values in memory and computes exact causal attention.
#pragma once

#include <cstdint>
#include <span>
#include <utility>

#include "decoder/attention/attention_backend.h"
#include "decoder/attention/kv_cache.h"
#include "prefixd/kv_shape.h"

namespace prefixd::decoder {

class LocalAttention : public AttentionBackend {
 public:
  // `first_position` is the position of the first token that the backend will hold. It is above 0
  // where another backend attends over the tokens before it (SplicedAttention).
  explicit LocalAttention(const KvGeometry& geometry, uint32_t first_position = 0)
      : first_position_(first_position), cache_(geometry) {}
  // Goes on from rows that are there already.
  explicit LocalAttention(KvCache rows) : first_position_(0), cache_(std::move(rows)) {}

  Status Attend(uint32_t layer, uint32_t first, uint32_t n, std::span<const float> q,
                std::span<const float> k, std::span<const float> v, std::span<float> out) override;
  // Attends as above and also writes the log-sum-exp of each query's scores: lse [n][n_q_heads],
  // natural logarithm.
  Status AttendWithLse(uint32_t layer, uint32_t first, uint32_t n, std::span<const float> q,
                       std::span<const float> k, std::span<const float> v, std::span<float> out,
                       std::span<float> lse);

  // Returns the position of the next token.
  uint32_t position() const { return first_position_ + cache_.size(); }
  // Removes the tokens at `position` and after, so that another question can follow the same
  // prompt.
  void TruncateTo(uint32_t position) {
    cache_.Truncate(position > first_position_ ? position - first_position_ : 0);
  }
  // Returns the stored rows, to persist (KvCache::Export) or inspect.
  const KvCache& cache() const { return cache_; }

 private:
  uint32_t first_position_;
  KvCache cache_;
};

}  // namespace prefixd::decoder
