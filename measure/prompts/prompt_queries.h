// Writes the queries of a synthetic prompt's last quarter, from which a put keeps a sample.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "measure/prompts/bench_prompt.h"
#include "measure/prompts/synthetic_kv.h"

namespace prefixd::bench {

inline Status WriteQueries(const Prompt& prompt, PutStream& put) {
  constexpr uint32_t kBlockTokens = 512;  // queries are float32 and wider than keys
  const KvGeometry& g = prompt.geometry;
  const auto n = static_cast<uint32_t>(prompt.tokens.size());
  for (uint32_t layer = 0; layer < g.n_layers; ++layer) {
    SyntheticKv synthetic(g.n_kv_heads, g.key_dim, layer + 1);
    std::vector<float> q;
    for (uint32_t first = n - n / 4; first < n; first += kBlockTokens) {
      const uint32_t count = std::min(kBlockTokens, n - first);
      q.resize(size_t{count} * g.n_q_heads * g.key_dim);
      for (size_t i = 0; i < size_t{count} * g.n_q_heads; ++i) {
        synthetic.Query(static_cast<uint32_t>(i % g.n_q_heads / g.group_size(0)),
                        &q[i * g.key_dim]);
      }
      PREFIXD_TRY(put.WriteQueries(layer, first, count, q));
    }
  }
  return {};
}

}  // namespace prefixd::bench
