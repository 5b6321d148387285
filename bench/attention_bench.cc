// Measures the CPU step of attention/ by itself: its cost given the retrieved set, the cost that
// completion adds, and the share of the machine's memory bandwidth that the exact pass reaches.
// Each figure has a floor that is measured in the same rounds: the bytes over the bandwidth of
// reading in sequence, and reading the same number of random rows without using them.
//
// The layer is one of an 8B model (32 query heads, 8 KV heads, dh 128, bf16); all cores work. Rows
// lie in memory as a store keeps them and are read in place; layers and sets rotate over at least
// four times the last-level cache. Figures are medians of the rounds; a ratio is the median of each
// round's ratio.
//
// It needs only the standard library, like attention/ itself.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>

#include "attention/kernels/kernels.h"
#include "bench/attention/measure.h"

namespace prefixd::bench {
namespace {

struct Options {
  uint32_t max_tokens = 1 << 20;
  int rounds = 9;
  unsigned threads = std::max(1u, std::thread::hardware_concurrency());
  std::string kernels, json_file;
};

constexpr const char* kUsage =
    "usage: attention_bench [--json FILE] [--max-tokens N] [--rounds R] [--threads T]\n"
    "                       [--kernels generic|avx2|avx512]\n";

// Returns nullptr when this machine has no such kernels.
const KernelTable* Named(const std::string& name) {
  if (name.empty()) return &Kernels();
  for (Isa isa : kAllIsas) {
    const KernelTable* table = KernelsFor(isa);
    if (table != nullptr && name == table->name) return table;
  }
  return nullptr;
}

bool Parse(int argc, char** argv, Options& options) {
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string flag = argv[i], value = argv[i + 1];
    if (flag == "--json") {
      options.json_file = value;
    } else if (flag == "--kernels") {
      options.kernels = value;
    } else if (flag == "--max-tokens") {
      options.max_tokens = static_cast<uint32_t>(std::strtoul(value.c_str(), nullptr, 10));
    } else if (flag == "--rounds") {
      options.rounds = std::max(1, std::atoi(value.c_str()));
    } else if (flag == "--threads") {
      options.threads = static_cast<unsigned>(std::max(1, std::atoi(value.c_str())));
    } else {
      return false;
    }
  }
  return argc % 2 == 1 && options.max_tokens >= 16384;
}

int Run(const Options& options) {
  const KernelTable* kernels = Named(options.kernels);
  if (kernels == nullptr) {
    std::fprintf(stderr, "this machine or build has no %s kernels\n", options.kernels.c_str());
    return 2;
  }
  const ScopedKernels use(*kernels);
  Team team(options.threads);
  const size_t cache = LastLevelCacheBytes();
  const size_t of_layer = size_t{options.max_tokens} * kKvHeads * kRow.bytes();
  const RowMemory memory(team, std::max(4 * cache, of_layer));
  std::printf(
      "attention on the CPU: %s kernels, %u threads, median of %d rounds\n"
      "rows in %.1f GB of memory, %.0f%% of it in huge pages; last-level cache %.0f MB\n",
      kernels->name, options.threads, options.rounds, static_cast<double>(memory.bytes()) / 1e9,
      100 * memory.huge_share(), static_cast<double>(cache) / 1e6);
  Report report;
  report.Fact("kernels", "\"" + std::string(kernels->name) + "\"");
  report.Fact("threads", std::to_string(options.threads));
  report.Fact("rounds", std::to_string(options.rounds));
  report.Fact("last_level_cache_bytes", std::to_string(cache));
  report.Fact("row_memory_bytes", std::to_string(memory.bytes()));
  report.Fact("huge_page_share", std::to_string(memory.huge_share()));
  MeasureLengths(team, memory, options.rounds, report);
  MeasureCompletion(team, memory, options.rounds, report);
  report.PrintRatios();
  if (!options.json_file.empty() && !report.WriteJson(options.json_file)) {
    std::fprintf(stderr, "cannot write '%s'\n", options.json_file.c_str());
    return 1;
  }
  return 0;
}

}  // namespace
}  // namespace prefixd::bench

int main(int argc, char** argv) {
  prefixd::bench::Options options;
  if (!prefixd::bench::Parse(argc, argv, options)) {
    std::fputs(prefixd::bench::kUsage, stderr);
    return 2;
  }
  return prefixd::bench::Run(options);
}
