#include "bench/steps/synthetic_put.h"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <numeric>
#include <span>

#include "attention/rows/rows.h"
#include "measure/prompts/synthetic_kv.h"

namespace prefixd::bench {

std::vector<uint32_t> SyntheticTokens(uint32_t n, uint32_t first) {
  std::vector<uint32_t> tokens(n);
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

Status PutSynthetic(Store& store, const ModelSpec& model, uint32_t n, uint32_t first,
                    double* making_s) {
  const KvGeometry& g = model.geometry;
  PREFIXD_TRY(store.RegisterModel(model));
  PREFIXD_ASSIGN(const auto put,
                 store.BeginPut({model.name, "", SyntheticTokens(n, first), "bench"}));
  SyntheticKv synthetic(g.n_kv_heads, g.key_dim, 1 + first);
  const size_t token = size_t{g.n_kv_heads} * g.key_dim;
  constexpr uint32_t kTogether = 4096;
  std::vector<float> k(kTogether * token), v(k.size());
  std::vector<std::byte> k16(k.size() * 2), v16(k16.size());
  const TokenRange missing = put->missing();
  for (uint32_t begin = missing.begin; begin < missing.end; begin += kTogether) {
    const uint32_t some = std::min(kTogether, missing.end - begin);
    const auto begun = std::chrono::steady_clock::now();
    for (uint32_t t = 0; t < some; ++t) synthetic.Token(&k[t * token], &v[t * token]);
    FromFloat(g.dtype, k, k16.data());
    FromFloat(g.dtype, v, v16.data());
    if (making_s != nullptr) {
      *making_s += std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
    }
    PREFIXD_TRY(put->Write(0, begin, some, std::span(k16).first(some * token * 2),
                           std::span(v16).first(some * token * 2)));
  }
  PREFIXD_ASSIGN(const PutResult stored, put->Commit());
  return store.WaitReady(stored.prefix, nullptr);
}

}  // namespace prefixd::bench
