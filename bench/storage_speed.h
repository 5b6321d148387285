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
#include "storage/file.h"

namespace prefixd::bench {

// One prompt's keys and values of a geometry, in memory.
struct Prompt {
  KvGeometry geometry;
  std::vector<uint32_t> tokens;
  std::vector<storage::AlignedBuffer> k, v;  // per layer, [n][n_kv_heads][dim]
  uint64_t row_bytes() const { return tokens.size() * geometry.token_bytes(); }
};

// Llama-3.2-1B: 16 layers, 32 query heads, 8 KV heads of 64, bf16.
KvGeometry Llama1B();
// In huge pages where the system has them, as NumPy's large arrays are; or in small ones.
Prompt SyntheticPrompt(const KvGeometry& geometry, uint32_t n_tokens, bool huge_pages);
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
  // Of `put`: the prompt's keys and values looked at once by one thread, after fio wrote. A put
  // must at least do this, and fio, which writes the same 16 MiB again and again, need not.
  Spread source_read;  // bytes per second
};

// Leaves `dir` empty.
Result<SpeedReport> MeasureSpeed(const Prompt& prompt, const SpeedOptions& options);

}  // namespace prefixd::bench
