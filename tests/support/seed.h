// Returns a seed for a randomised test: PREFIXD_SEED if set, else fresh entropy. It is always
// printed, so that PREFIXD_SEED=<n> can repeat a failure.
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
