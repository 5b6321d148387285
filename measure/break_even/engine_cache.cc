#include "measure/break_even/engine_cache.h"

#include <algorithm>

#include "attention/step/exact_pass.h"

namespace prefixd::bench {

EngineCache::EngineCache(const KvGeometry& geometry, uint32_t tokens, ThreadPool& pool)
    : geometry_(geometry), tokens_(tokens), pool_(pool), layers_(geometry.n_layers) {
  for (uint32_t l = 0; l < geometry.n_layers; ++l) {
    const RowShape row = geometry.row(l);
    Layer& layer = layers_[l];
    layer.k.assign(size_t{tokens} * geometry.n_kv_heads * row.key_bytes(), std::byte{1});
    layer.v.assign(size_t{tokens} * geometry.n_kv_heads * row.value_bytes(), std::byte{1});
    layer.of_head.resize(geometry.n_kv_heads);
    for (uint32_t h = 0; h < geometry.n_kv_heads; ++h) {
      for (uint32_t t = 0; t < tokens; ++t) {
        const size_t at = size_t{t} * geometry.n_kv_heads + h;
        layer.of_head[h].push_back(
            {&layer.k[at * row.key_bytes()], &layer.v[at * row.value_bytes()]});
      }
    }
  }
}

Status EngineCache::Restore(Session& session) {
  constexpr uint32_t kRun = 2048;
  for (uint32_t l = 0; l < geometry_.n_layers; ++l) {
    const RowShape row = geometry_.row(l);
    const size_t k_width = size_t{geometry_.n_kv_heads} * row.key_bytes();
    const size_t v_width = size_t{geometry_.n_kv_heads} * row.value_bytes();
    const std::span<std::byte> k = layers_[l].k, v = layers_[l].v;
    PREFIXD_TRY(pool_.ParallelFor((tokens_ + kRun - 1) / kRun, [&](size_t i) {
      LayerSlice slice;
      slice.layer = l;
      slice.tokens.begin = static_cast<uint32_t>(i) * kRun;
      slice.tokens.end = std::min(tokens_, slice.tokens.begin + kRun);
      const size_t at = slice.tokens.begin, n = slice.tokens.size();
      return session.ReadLayer(slice, k.subspan(at * k_width, n * k_width),
                               v.subspan(at * v_width, n * v_width));
    }));
  }
  return {};
}

Status EngineCache::Attend(uint32_t l, std::span<const float> q, std::span<float> y) {
  const KvGeometry& g = geometry_;
  const uint32_t group = g.group_size(l);
  const size_t q_width = size_t{group} * g.key_dim, y_width = size_t{group} * g.value_dim;
  return pool_.ParallelFor(g.n_kv_heads, [&](size_t h) -> Status {
    ExactPass pass;
    PREFIXD_TRY(pass.Begin(q.subspan(h * q_width, q_width), group, g.layers[l], g.row(l)));
    std::vector<float> lse(group);
    if (!pass.Add(ScatteredRows(layers_[l].of_head[h], g.row(l))) ||
        !pass.Finish(y.subspan(h * y_width, y_width), lse)) {
      return Error{Code::kInternal, "full attention over restored rows is not finite"};
    }
    return {};
  });
}

}  // namespace prefixd::bench
