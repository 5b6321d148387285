// Returns a seed for a randomised test, of its own for each name: from PREFIXD_SEED if set, else
// from fresh entropy. What it comes from is always printed, so that PREFIXD_SEED=<n> can repeat a
// failure.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>

namespace prefixd::testing {

inline uint64_t Seed(const char* test_name) {
  const char* fixed = std::getenv("PREFIXD_SEED");
  const uint64_t base = fixed ? std::strtoull(fixed, nullptr, 10) : std::random_device{}();
  std::printf("[ SEED     ] %s: PREFIXD_SEED=%llu\n", test_name, (unsigned long long)base);
  uint64_t seed = base;
  for (const char* c = test_name; *c != 0; ++c) {
    seed = (seed ^ static_cast<unsigned char>(*c)) * 0x100000001b3;  // FNV-1a
  }
  return seed;
}

}  // namespace prefixd::testing
