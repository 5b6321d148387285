// Bytes per second that one thread reads from memory.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

namespace prefixd::bench {

// Sums of whole lines of all of `bytes`, which should be several times the last-level cache.
inline double ReadBandwidth(std::span<const std::byte> bytes) {
  const auto begun = std::chrono::steady_clock::now();
  uint64_t sums[32] = {}, words[32];
  for (size_t i = 0; i + sizeof words <= bytes.size(); i += sizeof words) {
    std::memcpy(words, bytes.data() + i, sizeof words);
    for (int l = 0; l < 32; ++l) sums[l] += words[l];
  }
  volatile uint64_t sink = 0;
  for (const uint64_t sum : sums) sink = sink + sum;
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
  return double(bytes.size()) / seconds;
}

}  // namespace prefixd::bench
