#include "measure/prompts/synthetic_put.h"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <span>

#include "attention/rows/rows.h"

namespace prefixd::bench {

Result<double> WriteSynthetic(PutStream& put, const KvGeometry& g, uint32_t tokens,
                              std::vector<SyntheticKv>& synthetic,
                              const std::function<void(uint32_t layer)>& written) {
  using Clock = std::chrono::steady_clock;
  constexpr uint32_t kBlock = 1024;
  double writing = 0;
  const size_t row = size_t{g.n_kv_heads} * g.key_dim;
  const size_t width = row * DTypeBytes(g.dtype);
  std::vector<float> k(kBlock * row), v(k.size());
  std::vector<std::byte> kb(kBlock * width), vb(kb.size());
  for (uint32_t layer = 0; layer < g.n_layers; ++layer) {
    for (uint32_t first = 0; first < tokens; first += kBlock) {
      const uint32_t n = std::min(kBlock, tokens - first);
      for (uint32_t i = 0; i < n; ++i) synthetic[layer].Token(&k[i * row], &v[i * row]);
      FromFloat(g.dtype, std::span(k).first(n * row), kb.data());
      FromFloat(g.dtype, std::span(v).first(n * row), vb.data());
      const auto begun = Clock::now();
      PREFIXD_TRY(put.Write(layer, first, n, std::span(kb).first(n * width),
                            std::span(vb).first(n * width)));
      writing += std::chrono::duration<double>(Clock::now() - begun).count();
    }
    written(layer);
  }
  return writing;
}

}  // namespace prefixd::bench
