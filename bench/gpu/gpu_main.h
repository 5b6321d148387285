// Runs the command line of the GPU benchmarks, with and without a device.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <string>

#include "bench/support/figures.h"
#include "prefixd/gpu/device.h"
#include "prefixd/result.h"

namespace prefixd::bench {

// Holds --json FILE, --rounds N, --max-tokens N.
struct GpuBenchOptions {
  std::string json_file;
  int rounds = 30;
  unsigned long max_tokens = 1 << 20;

  // Returns false, with a usage line on stderr, when an argument is invalid.
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

inline constexpr int kNoDevice = 3;  // exit code where a device is needed and none is found

// Measures and writes the figures; without a device it prints and writes why there are none.
// Returns the exit code.
inline int GpuBenchMain(int argc, char** argv, const std::string& name,
                        Status (*measure)(const GpuBenchOptions&, const gpu::DeviceInfo&,
                                          Figures&)) {
  GpuBenchOptions options;
  if (!options.Parse(argc, argv)) return 2;
  const auto fail = [&](const std::string& why) {
    std::fprintf(stderr, "%s_bench: %s\n", name.c_str(), why.c_str());
    return 1;
  };
  Figures figures;
  const Result<gpu::DeviceInfo> device = gpu::ProbeDevice();
  if (device.ok()) {
    std::printf("%s: one layer, 8 KV heads, 32 query heads, dh 128, bf16\n", device->name.c_str());
    if (const Status s = measure(options, *device, figures); !s.ok()) {
      return fail(s.error().ToString());
    }
  } else {
    figures.Skip("no device: " + device.error().message);
  }
  const std::string device_name = device.ok() ? device->name : "";
  if (!options.json_file.empty() && !figures.Write(options.json_file, name, device_name)) {
    return fail("cannot write " + options.json_file);
  }
  return device.ok() ? 0 : kNoDevice;
}

}  // namespace prefixd::bench
