// Put, restore and row reads through storage/ and runtime/, each in turns with its floor on the
// same file system: fio for the disk, memcpy for the host tier.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "attention/kv_shape.h"
#include "bench/support/paired.h"
#include "runtime/store.h"

namespace prefixd::bench {

// One prompt's keys and values of a geometry, in memory.
struct Prompt {
  KvGeometry geometry;
  std::vector<uint32_t> tokens;
  std::vector<std::vector<std::byte>> k, v;  // per layer, [n][n_kv_heads][dim]
  uint64_t row_bytes() const { return tokens.size() * geometry.token_bytes(); }
};

// Llama-3.2-1B: 16 layers, 32 query heads, 8 KV heads of 64, bf16.
KvGeometry Llama1B();
Prompt SyntheticPrompt(const KvGeometry& geometry, uint32_t n_tokens);
inline constexpr char kModelName[] = "bench";
ModelSpec BenchModel(const KvGeometry& geometry);
// Writes all of it, layer by layer in blocks as a prefill does, without committing.
Status WritePrompt(const Prompt& prompt, PutStream& put);

struct SpeedOptions {
  std::filesystem::path dir;  // empty, on the disk to be measured
  std::vector<std::string> parts = {"put", "segment", "restore", "rows", "host"};
  uint32_t pairs = 7;
  uint32_t threads = 0;  // of a restore; 0: one per core
  std::string io = "auto";
};

struct SpeedReport {
  std::string io_backend, fio_engine;
  uint32_t threads = 0;
  std::map<std::string, Paired> lines;  // by part
};

// Leaves `dir` empty.
Result<SpeedReport> MeasureSpeed(const Prompt& prompt, const SpeedOptions& options);

}  // namespace prefixd::bench
