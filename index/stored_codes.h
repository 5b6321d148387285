// Compact codes as they are stored, inside an envelope. Internal to index/.
//
// Payload, little-endian:
//   u32 version (1) | u32 components | u8 digits[components] | zeros to a multiple of 4 |
//   f32 centre[key_dim] | bf16 directions[components][key_dim] | zeros to a multiple of 64 |
//   codes: CodeBlocks(covered.size()) blocks (attention/key_codes.h)
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "attention/key_codes.h"
#include "attention/partition.h"
#include "attention/result.h"
#include "index/envelope.h"

namespace prefixd::index {

struct StoredCodes {
  CodeBook book;
  std::span<const std::byte> codes;  // borrows from the payload
};

// codes: CodeBlocks(covered.size()) * CodeBlockBytes(book.key_dim) bytes. Sealed.
std::vector<std::byte> SerializeCodes(const CodeBook& book, TokenRange covered,
                                      std::span<const std::byte> codes);
// kCorrupt unless the payload is what SerializeCodes wrote for the envelope's fields.
Result<StoredCodes> ParseCodes(const OpenedEnvelope& opened);

}  // namespace prefixd::index
