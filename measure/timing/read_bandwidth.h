// Reads memory without using it, in the widest loads that the machine has. Narrow loads keep too
// few lines in flight to reach the bandwidth (on one Sapphire Rapids 16-byte loads read 21 GB/s
// where 64-byte ones read 29).
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

namespace prefixd::bench {

// Returns the sum of [at, at + n) in words; n is a multiple of 64.
template <typename Vec>
inline __attribute__((always_inline)) uint64_t SumOfLines(const std::byte* at, size_t n) {
  constexpr size_t kVecs = 64 / sizeof(Vec);
  Vec sum[kVecs] = {};
  for (size_t i = 0; i < n; i += 64) {
    for (size_t v = 0; v < kVecs; ++v) {
      Vec x;
      std::memcpy(&x, at + i + v * sizeof(Vec), sizeof x);
      sum[v] += x;
    }
  }
  uint64_t total = 0;
  for (size_t v = 0; v < kVecs; ++v) {
    for (size_t l = 0; l < sizeof(Vec) / 8; ++l) total += sum[v][l];
  }
  return total;
}

typedef uint64_t Words2 __attribute__((vector_size(16)));

#if defined(__x86_64__)
typedef uint64_t Words8 __attribute__((vector_size(64)));
inline bool HasWideLoads() { return __builtin_cpu_supports("avx512f"); }
__attribute__((target("avx512f"))) inline uint64_t SumOfWideLines(const std::byte* at, size_t n) {
  return SumOfLines<Words8>(at, n);
}
#endif

inline uint64_t TouchLines(const std::byte* at, size_t n) {
#if defined(__x86_64__)
  if (HasWideLoads()) return SumOfWideLines(at, n);
#endif
  return SumOfLines<Words2>(at, n);
}

// Returns the bytes per second that one thread reads. `bytes` should be several times the
// last-level cache.
inline double ReadBandwidth(std::span<const std::byte> bytes) {
  const auto begun = std::chrono::steady_clock::now();
  volatile uint64_t sink = TouchLines(bytes.data(), bytes.size() / 64 * 64);
  static_cast<void>(sink);
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
  return double(bytes.size()) / seconds;
}

}  // namespace prefixd::bench
