// Evaluates learned positive feature maps in the log domain ([RC] App. J).
//
//   g0 = W_in x + b_in;  h = W2 GELU(W1 g0 + b1) + b2;  g1 = g0 + alpha h;
//   log phi(x) = W_out g1 + b_out
//
// GELU is the erf form. x has RoPE applied. Work with log phi, never with phi alone.
//
// Thread-safety: const methods may be called from any number of threads.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "prefixd/kv_shape.h"
#include "prefixd/result.h"

namespace prefixd {

// Holds one head's map and owns its weights, float32, row-major [out][in].
struct FeatureMap {
  uint32_t in_dim = 0, d_emb = 0, d_phi = 0;
  std::vector<float> w_in, b_in, w1, b1, w2, b2, w_out, b_out;
  float alpha = 0;

  Status Validate() const;  // sizes agree, everything finite
  // x: [n][in_dim] float32 -> out: [n][d_phi] log phi.
  void LogPhi(std::span<const float> x, size_t n, std::span<float> out) const;
};

// Holds the maps of a whole model, for one target prefix length.
struct FeatureMapSet {
  uint32_t length = 0;  // prefix length they were trained for, tokens
  uint32_t d_phi = 0;
  std::string digest;             // digest over the weights and this kernel: caches record it
  std::vector<FeatureMap> phi_q;  // [n_layers * n_q_heads]; empty: symmetric, phi_k serves queries
  std::vector<FeatureMap> phi_k;  // [n_layers * n_kv_heads]

  Status Validate(const KvGeometry& geometry) const;
};

}  // namespace prefixd
