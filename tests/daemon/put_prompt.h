// Makes a small random model and prompt, and puts it through any client.
#pragma once

#include <random>
#include <string>
#include <vector>

#include "attention/rows/rows.h"
#include "prefixd/client.h"

namespace prefixd::testing {

struct Prompt {
  ModelSpec model;
  std::vector<uint32_t> tokens;
  std::vector<std::vector<std::byte>> k, v;  // per layer: [n][n_kv_heads][dim]
};

inline Prompt MakePrompt(uint32_t n_tokens, uint64_t seed) {
  std::mt19937_64 rng(seed);
  std::normal_distribution<float> normal;
  Prompt p;
  p.model.name = "test-model";
  p.model.geometry = {2, 4, 2, 16, 16, DType::kBf16, {{0.25f, 0, 0}, {0.25f, 0, 0}}};
  p.model.identity = {{"weights", "random"}};
  for (uint32_t i = 0; i < n_tokens; ++i) p.tokens.push_back(uint32_t(rng() % 50000));
  for (uint32_t layer = 0; layer < 2; ++layer) {
    for (auto* out : {&p.k, &p.v}) {
      std::vector<float> values(size_t{n_tokens} * 2 * 16);
      for (float& x : values) x = normal(rng);
      std::vector<std::byte> bytes(values.size() * 2);
      FromFloat(DType::kBf16, values, bytes.data());
      out->push_back(std::move(bytes));
    }
  }
  return p;
}

// Writes each layer in two runs of tokens, like a prefill in chunks.
inline Status WriteRows(PutStream& put, const Prompt& p) {
  const auto n = uint32_t(p.tokens.size());
  const size_t token = 2 * 16 * 2;
  for (uint32_t layer = 0; layer < 2; ++layer) {
    for (const TokenRange r : {TokenRange{0, n / 2}, TokenRange{n / 2, n}}) {
      const std::span<const std::byte> k(p.k[layer]), v(p.v[layer]);
      PREFIXD_TRY(put.Write(layer, r.begin, r.size(), k.subspan(r.begin * token, r.size() * token),
                            v.subspan(r.begin * token, r.size() * token)));
    }
  }
  return {};
}

inline Result<PutResult> PutPrompt(Store& client, const Prompt& p, const std::string& label = "") {
  PREFIXD_TRY(client.RegisterModel(p.model));
  PREFIXD_ASSIGN(auto put, client.BeginPut({p.model.name, "", p.tokens, label}));
  PREFIXD_TRY(WriteRows(*put, p));
  return put->Commit();
}

}  // namespace prefixd::testing
