// A seed for a randomised test: PREFIXD_SEED if set, else fresh entropy; always printed, so that a
// failure can be replayed with PREFIXD_SEED=<n>.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>

namespace prefixd::testing {

inline uint64_t Seed(const char* test_name) {
  const char* fixed = std::getenv("PREFIXD_SEED");
  const uint64_t seed = fixed ? std::strtoull(fixed, nullptr, 10) : std::random_device{}();
  std::printf("[ SEED     ] %s: PREFIXD_SEED=%llu\n", test_name, (unsigned long long)seed);
  return seed;
}

}  // namespace prefixd::testing
