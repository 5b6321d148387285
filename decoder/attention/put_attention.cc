#include "decoder/attention/put_attention.h"

#include <algorithm>

#include "attention/rows/rows.h"

namespace prefixd::decoder {

Status PutAttention::Attend(uint32_t layer, uint32_t first, uint32_t n, std::span<const float> q,
                            std::span<const float> k, std::span<const float> v,
                            std::span<float> out) {
  PREFIXD_TRY(inner_.Attend(layer, first, n, q, k, v, out));
  k_bytes_.resize(k.size() * DTypeBytes(geometry_.dtype));
  v_bytes_.resize(v.size() * DTypeBytes(geometry_.dtype));
  FromFloat(geometry_.dtype, k, k_bytes_.data());
  FromFloat(geometry_.dtype, v, v_bytes_.data());
  PREFIXD_TRY(put_.Write(layer, first, n, k_bytes_, v_bytes_));
  return put_.WriteQueries(layer, first, n, q);
}

Status PutCache(const KvCache& cache, uint32_t first, uint32_t n, PutStream& put) {
  constexpr uint32_t kBlockTokens = 1024;
  const KvGeometry& g = cache.geometry();
  const RowShape row = g.row(0);
  std::vector<std::byte> k, v;
  for (uint32_t layer = 0; layer < g.n_layers; ++layer) {
    for (uint32_t done = 0; done < n; done += kBlockTokens) {
      const uint32_t count = std::min(kBlockTokens, n - done);
      k.resize(size_t{count} * g.n_kv_heads * row.key_bytes());
      v.resize(size_t{count} * g.n_kv_heads * row.value_bytes());
      PREFIXD_TRY(cache.Export(layer, first + done, count, k, v));
      PREFIXD_TRY(put.Write(layer, first + done, count, k, v));
    }
  }
  return {};
}

}  // namespace prefixd::decoder
