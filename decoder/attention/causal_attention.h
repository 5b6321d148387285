// Computes exact causal attention of one KV head in blocks, with BLAS, over the decoder's own
// tokens.
#pragma once

#include <cstdint>

namespace prefixd::decoder {

// There are n_past + n keys and values. Query token i has number n_past + i and sees keys [0,
// n_past + i]. Its `group` query heads lie side by side.
struct CausalShape {
  uint32_t n = 0, n_past = 0;
  uint32_t group = 0, key_dim = 0, value_dim = 0;
  float scale = 0;
  uint32_t n_q_heads = 0;  // the whole layer's heads: the distance of token rows in q, y and lse
};

// Holds the pointers of KV head h; each starts at the head's first query head:
//   q     [n][n_q_heads][key_dim]   -> q + h * group * key_dim
//   keys  [n_past + n][key_dim], values [n_past + n][value_dim]
//   y     [n][n_q_heads][value_dim] -> y + h * group * value_dim
//   lse   [n][n_q_heads]            -> lse + h * group; natural logarithm; may be nullptr
struct CausalHead {
  const float* q = nullptr;
  const float* keys = nullptr;
  const float* values = nullptr;
  float* y = nullptr;
  float* lse = nullptr;
};

// Returns the number of tiles: runs of consecutive query tokens, computed independently.
uint32_t CausalTiles(const CausalShape& shape);
// Computes tile number `tile` of one head: float32, softmax online over blocks of keys.
void CausalAttentionTile(const CausalShape& shape, const CausalHead& head, uint32_t tile);

}  // namespace prefixd::decoder
