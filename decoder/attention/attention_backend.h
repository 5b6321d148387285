// Defines the interface between the decoder and whatever holds its KV cache.
//
// The model computes queries, keys and values of its new tokens and passes them on, layer by layer;
// the backend decides how and where attention is computed. There are three:
//   LocalAttention    keys and values in memory, exact (local_attention.h)
//   SplicedAttention  a stored prefix in prefixd, own tokens in memory (spliced_attention.h)
//   PutAttention      wraps another and streams what passes into prefixd (put_attention.h)
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <utility>

#include "prefixd/result.h"

namespace prefixd::decoder {

class AttentionBackend {
 public:
  virtual ~AttentionBackend() = default;

  // Called once per layer, in order, with the new tokens at positions [first, first + n). Stores
  // their keys and values and computes causal attention of their queries over all positions up to
  // and including their own.
  //   q   [n][n_q_heads][key_dim]    after QK-norm and RoPE, float32
  //   k   [n][n_kv_heads][key_dim]   likewise
  //   v   [n][n_kv_heads][value_dim]
  //   out [n][n_q_heads][value_dim]
  // Everything is borrowed for the call. kFailedPrecondition when `first` is not the next position.
  // After an error the backend may hold some layers of the new tokens: discard it, or truncate it
  // where it can be truncated. One thread at a time.
  virtual Status Attend(uint32_t layer, uint32_t first, uint32_t n, std::span<const float> q,
                        std::span<const float> k, std::span<const float> v,
                        std::span<float> out) = 0;
};

// The observer receives the queries of every call before attention is computed, for sampling or
// logging.
//   q: [n][n_q_heads][key_dim] of tokens [first, first + n)
using QueryObserver =
    std::function<void(uint32_t layer, uint32_t first, uint32_t n, std::span<const float> q)>;

// Shows the queries to `observer` and forwards the call to another backend, which must outlive it.
class ObservedAttention : public AttentionBackend {
 public:
  ObservedAttention(AttentionBackend& inner, QueryObserver observer)
      : inner_(inner), observer_(std::move(observer)) {}

  Status Attend(uint32_t layer, uint32_t first, uint32_t n, std::span<const float> q,
                std::span<const float> k, std::span<const float> v, std::span<float> out) override {
    observer_(layer, first, n, q);
    return inner_.Attend(layer, first, n, q, k, v, out);
  }

 private:
  AttentionBackend& inner_;
  QueryObserver observer_;
};

}  // namespace prefixd::decoder
