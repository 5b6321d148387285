// Arranges a prompt's rows for measurements of storage.
//
// Thread-safety: pure functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <vector>

#include "measure/prompts/bench_prompt.h"
#include "prefixd/result.h"
#include "storage/store/prefix_store.h"

namespace prefixd::bench {

// As a segment has them: by layer, [n_kv_heads][n][row bytes].
std::vector<std::vector<std::byte>> InterleavedRows(const Prompt& prompt);
// Single rows of all heads of all layers, ascending in each; each in a page of its own where rows
// lie as written, and no two pages near. `count`: all of them.
std::vector<std::vector<uint32_t>> SparseRows(const Prompt& prompt, uint64_t seed, size_t* count);
// An order of stored rows that is independent of the tokens' order.
storage::ReclusterOptions AnyOrder(const Prompt& prompt);
// The file that has the rows of a store's only prompt; empty where there is none.
std::filesystem::path LargestFile(const std::filesystem::path& dir);
// Seconds that one thread takes to read all keys and values once.
Result<double> ReadOnce(const Prompt& prompt);

}  // namespace prefixd::bench
