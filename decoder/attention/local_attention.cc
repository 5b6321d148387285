#include "decoder/attention/local_attention.h"

#include <string>

#include "decoder/attention/causal_attention.h"
#include "decoder/parallel.h"

namespace prefixd::decoder {

Status LocalAttention::Attend(uint32_t layer, uint32_t first, uint32_t n, std::span<const float> q,
                              std::span<const float> k, std::span<const float> v,
                              std::span<float> out) {
  return AttendWithLse(layer, first, n, q, k, v, out, {});
}

Status LocalAttention::AttendWithLse(uint32_t layer, uint32_t first, uint32_t n,
                                     std::span<const float> q, std::span<const float> k,
                                     std::span<const float> v, std::span<float> out,
                                     std::span<float> lse) {
  const KvGeometry& g = cache_.geometry();
  if (layer >= g.n_layers) {
    return InvalidArgument("attention: no layer " + std::to_string(layer));
  }
  if (q.size() != size_t{n} * g.n_q_heads * g.key_dim ||
      k.size() != size_t{n} * g.n_kv_heads * g.key_dim ||
      v.size() != size_t{n} * g.n_kv_heads * g.value_dim ||
      out.size() != size_t{n} * g.n_q_heads * g.value_dim ||
      (!lse.empty() && lse.size() != size_t{n} * g.n_q_heads)) {
    return InvalidArgument("attention: a tensor of layer " + std::to_string(layer) +
                           " does not fit the geometry");
  }
  if (g.layers[layer].softcap != 0 || g.layers[layer].sliding_window != 0) {
    return InvalidArgument("attention: layer " + std::to_string(layer) +
                           " has a softcap or a sliding window, which this decoder cannot do");
  }
  const uint32_t past = cache_.size(layer);
  if (first != first_position_ + past) {
    return Error{Code::kFailedPrecondition, "attention: layer " + std::to_string(layer) +
                                                " holds positions up to " +
                                                std::to_string(first_position_ + past) +
                                                " but got position " + std::to_string(first)};
  }
  cache_.Append(layer, n, k, v);
  const CausalShape shape = {.n = n,
                             .n_past = past,
                             .group = g.group_size(0),
                             .key_dim = g.key_dim,
                             .value_dim = g.value_dim,
                             .scale = g.layers[layer].scale,
                             .n_q_heads = g.n_q_heads};
  const uint32_t tiles = CausalTiles(shape);
  const size_t work = size_t{n} * (past + n) * g.n_q_heads * (g.key_dim + g.value_dim);
  ParallelFor(size_t{tiles} * g.n_kv_heads, work, [&](size_t i) {
    const auto h = static_cast<uint32_t>(i / tiles), tile = static_cast<uint32_t>(i % tiles);
    const size_t first_q = size_t{h} * g.group_size(0);
    const CausalHead head = {.q = q.data() + first_q * g.key_dim,
                             .keys = cache_.keys(layer, h).data(),
                             .values = cache_.values(layer, h).data(),
                             .y = out.data() + first_q * g.value_dim,
                             .lse = lse.empty() ? nullptr : lse.data() + first_q};
    CausalAttentionTile(shape, head, tile);
  });
  return {};
}

}  // namespace prefixd::decoder
