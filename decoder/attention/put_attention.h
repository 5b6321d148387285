// Persists a prompt during its prefill: forwards to another backend and streams the keys, values
// and queries into a PutStream.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "decoder/attention/attention_backend.h"
#include "decoder/attention/kv_cache.h"
#include "prefixd/client.h"

namespace prefixd::decoder {

class PutAttention : public AttentionBackend {
 public:
  // `inner` and `put` must outlive it. `geometry` is the registered model's. Keys and values are
  // rounded to its dtype just as KvCache rounds them, so that the stored rows are those that
  // `inner` attended to. The caller commits `put`.
  PutAttention(AttentionBackend& inner, PutStream& put, const KvGeometry& geometry)
      : inner_(inner), put_(put), geometry_(geometry) {}

  Status Attend(uint32_t layer, uint32_t first, uint32_t n, std::span<const float> q,
                std::span<const float> k, std::span<const float> v, std::span<float> out) override;

 private:
  AttentionBackend& inner_;
  PutStream& put_;
  KvGeometry geometry_;
  std::vector<std::byte> k_bytes_, v_bytes_;
};

// Persists rows that a cache already holds: tokens [first, first + n) of every layer, in blocks.
Status PutCache(const KvCache& cache, uint32_t first, uint32_t n, PutStream& put);

}  // namespace prefixd::decoder
