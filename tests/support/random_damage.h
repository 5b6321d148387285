// Damages serialized bytes as disks and mistakes do.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "tests/support/random_kv.h"

namespace prefixd::testing {

// Flips a few bits, more often in the first `header` bytes than elsewhere; sometimes also
// truncates.
inline std::vector<std::byte> Damaged(Random& random, std::vector<std::byte> bytes,
                                      uint32_t header) {
  const auto size = static_cast<uint32_t>(bytes.size());
  for (uint32_t flips = random.Int(1, 6); flips > 0; --flips) {
    const size_t at = random.Chance(0.4) ? random.Int(0, header - 1) : random.Int(0, size - 1);
    bytes[at] ^= static_cast<std::byte>(1u << random.Int(0, 7));
  }
  if (random.Chance(0.2)) bytes.resize(random.Int(0, size));
  return bytes;
}

}  // namespace prefixd::testing
