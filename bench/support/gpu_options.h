// Command line of the GPU benchmarks. Standard library only.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <string>

namespace prefixd::bench {

// --json FILE, --rounds N, --max-tokens N.
struct GpuBenchOptions {
  std::string json_file;
  int rounds = 30;
  unsigned long max_tokens = 1 << 20;

  // False, with a usage line on stderr, when an argument is not understood.
  bool Parse(int argc, char** argv) {
    for (int i = 1; i < argc; i += 2) {
      const std::string flag = argv[i];
      const char* value = i + 1 < argc ? argv[i + 1] : nullptr;
      if (flag == "--json" && value) {
        json_file = value;
      } else if (flag == "--rounds" && value && std::atoi(value) > 0) {
        rounds = std::atoi(value);
      } else if (flag == "--max-tokens" && value) {
        max_tokens = std::strtoul(value, nullptr, 10);
      } else {
        std::fprintf(stderr, "usage: %s [--json FILE] [--rounds N] [--max-tokens N]\n", argv[0]);
        return false;
      }
    }
    return true;
  }
};

}  // namespace prefixd::bench
