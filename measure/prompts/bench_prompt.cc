#include "measure/prompts/bench_prompt.h"

#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <span>

#include "attention/rows/rows.h"
#include "measure/prompts/synthetic_kv.h"
#include "runtime/work/thread_pool.h"

namespace prefixd::bench {
namespace {

constexpr uint32_t kBlockTokens = 1024;  // tokens per write, as in a chunked prefill

}  // namespace

KvGeometry Llama1B() {
  KvGeometry g{16, 32, 8, 64, 64, DType::kBf16, {}};
  g.layers.assign(g.n_layers, {.scale = 1.0f / std::sqrt(float(g.key_dim))});
  return g;
}

ModelSpec BenchModel(const KvGeometry& geometry) {
  return {kModelName, geometry, {{"weights", "synthetic"}}, {}};
}

Prompt SyntheticPrompt(const KvGeometry& geometry, uint32_t n_tokens, bool huge_pages) {
  Prompt prompt{geometry, std::vector<uint32_t>(n_tokens), {}, {}};
  for (uint32_t i = 0; i < n_tokens; ++i) prompt.tokens[i] = i;
  const size_t token = size_t{geometry.n_kv_heads} * geometry.key_dim;
  for (auto* part : {&prompt.k, &prompt.v}) {
    for (uint32_t layer = 0; layer < geometry.n_layers; ++layer) {
      const auto& bytes = part->emplace_back(n_tokens * token * DTypeBytes(geometry.dtype));
      if (!huge_pages) ::madvise(bytes.data(), bytes.size(), MADV_NOHUGEPAGE);
    }
  }
  constexpr uint32_t kBlock = 256;  // tokens made at a time
  ThreadPool pool(0);
  const Status made = pool.ParallelFor(geometry.n_layers, [&](size_t layer) -> Status {
    SyntheticKv synthetic(geometry.n_kv_heads, geometry.key_dim, static_cast<uint32_t>(layer) + 1);
    std::vector<float> k(kBlock * token), v(k.size());
    for (uint32_t first = 0; first < n_tokens; first += kBlock) {
      const size_t n = std::min(kBlock, n_tokens - first) * token;
      for (size_t at = 0; at < n; at += token) synthetic.Token(&k[at], &v[at]);
      const size_t to = first * token * DTypeBytes(geometry.dtype);
      FromFloat(geometry.dtype, std::span(k).first(n), prompt.k[layer].data() + to);
      FromFloat(geometry.dtype, std::span(v).first(n), prompt.v[layer].data() + to);
    }
    return {};
  });
  static_cast<void>(made);  // the work cannot fail
  return prompt;
}

Status WritePrompt(const Prompt& prompt, PutStream& put) {
  const auto n = static_cast<uint32_t>(prompt.tokens.size());
  const KvGeometry& g = prompt.geometry;
  const size_t k_token = g.n_kv_heads * g.row(0).key_bytes();
  const size_t v_token = g.n_kv_heads * g.row(0).value_bytes();
  for (uint32_t layer = 0; layer < g.n_layers; ++layer) {
    for (uint32_t first = 0; first < n; first += kBlockTokens) {
      const uint32_t count = std::min(kBlockTokens, n - first);
      PREFIXD_TRY(put.Write(layer, first, count,
                            prompt.k[layer].span().subspan(first * k_token, count * k_token),
                            prompt.v[layer].span().subspan(first * v_token, count * v_token)));
    }
  }
  return {};
}

}  // namespace prefixd::bench
