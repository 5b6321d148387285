// Makes a synthetic prompt and its model, for benchmarks that put one into a store.
#pragma once

#include <cstdint>
#include <vector>

#include "prefixd/kv_shape.h"
#include "prefixd/result.h"
#include "runtime/store/local_store.h"
#include "storage/io/file.h"

namespace prefixd::bench {

// Holds one prompt's keys and values of a geometry in memory.
struct Prompt {
  KvGeometry geometry;
  std::vector<uint32_t> tokens;
  std::vector<storage::AlignedBuffer> k, v;  // per layer, [n][n_kv_heads][dim]
  uint64_t row_bytes() const { return tokens.size() * geometry.token_bytes(); }
};

// Returns Llama-3.2-1B: 16 layers, 32 query heads, 8 KV heads of 64, bf16.
KvGeometry Llama1B();
// Makes the prompt in huge pages where the system has them, like NumPy's large arrays, or in small
// ones.
Prompt SyntheticPrompt(const KvGeometry& geometry, uint32_t n_tokens, bool huge_pages);
inline constexpr char kModelName[] = "bench";
ModelSpec BenchModel(const KvGeometry& geometry);
// Writes the whole prompt, layer by layer in blocks as a prefill does, without committing.
Status WritePrompt(const Prompt& prompt, PutStream& put);

}  // namespace prefixd::bench
