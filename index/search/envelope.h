// The bytes around a stored index: what it is, what it covers, and a checksum. Internal to index/.
//
// Little-endian, in this order:
//   magic[8] "PFXDINDX" | u32 version | u32 header bytes | u64 XXH3 of all that follows |
//   u32 kind | u32 covered.begin | u32 covered.end | u32 key_dim | u32 n_lists |
//   f32 probe_fraction | u32 seed | u32 zero | u64 payload bytes | payload
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "prefixd/partition.h"
#include "prefixd/result.h"

namespace prefixd::index {

inline constexpr uint32_t kEnvelopeVersion = 1;
inline constexpr size_t kEnvelopeBytes = 64;

struct Envelope {
  uint32_t kind = 0;  // IndexKind
  TokenRange covered;
  uint32_t key_dim = 0;
  uint32_t n_lists = 0;
  float probe_fraction = 0;
  uint32_t seed = 0;
};

// What Seal put in; `payload` borrows from the bytes that were opened.
struct OpenedEnvelope {
  Envelope fields;
  std::span<const std::byte> payload;
};

std::vector<std::byte> Seal(const Envelope& fields, std::span<const std::byte> payload);
// kCorrupt unless every byte is as Seal wrote it.
Result<OpenedEnvelope> Open(std::span<const std::byte> bytes);

}  // namespace prefixd::index
