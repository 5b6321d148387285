// Compact codes as they are stored, inside an envelope. Internal to index/.
//
// Payload, little-endian:
//   u32 version (2) | u32 components | u8 digits[components] | u8 mean_digits[components] |
//   zeros to a multiple of 4 | f32 centre[key_dim] | f32 mean_ratios[components] |
//   f32 variances[components] | bf16 directions[components][key_dim] | zeros to a multiple of 64 |
//   the arrays of BlockLayout(key_dim, covered.size()) (block_codes.h)
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "index/codes/block_codes.h"
#include "index/search/envelope.h"
#include "prefixd/partition.h"
#include "prefixd/result.h"

namespace prefixd::index {

struct StoredCodes {
  BlockCodeBook book;
  std::span<const std::byte> arrays;  // borrows from the payload
};

// arrays: of BlockLayout(key_dim, covered.size()). Sealed.
std::vector<std::byte> SerializeCodes(const BlockCodeBook& book, TokenRange covered,
                                      std::span<const std::byte> arrays);
// kCorrupt unless the payload is what SerializeCodes wrote for the envelope's fields; the arrays
// are not looked into (BlockCodes::Validate).
Result<StoredCodes> ParseCodes(const OpenedEnvelope& opened);

}  // namespace prefixd::index
