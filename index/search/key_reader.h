// Where an index reads exact keys that are not in memory as a whole.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "prefixd/partition.h"
#include "prefixd/result.h"

namespace prefixd::index {

// The keys of one (layer, KV head), by token position. Out: densely, key_bytes each.
// Thread-safety: as the implementation says; an index calls it from the searching thread only.
class KeyReader {
 public:
  virtual ~KeyReader() = default;
  // ids ascending.
  virtual Status Gather(std::span<const uint32_t> ids, std::span<std::byte> out) = 0;
  virtual Status Range(TokenRange tokens, std::span<std::byte> out) = 0;
  // Where a sequential read that begins at `begin` had best end: at most `max_tokens` further.
  virtual uint32_t RunEnd(uint32_t begin, uint32_t max_tokens) const { return begin + max_tokens; }
};

}  // namespace prefixd::index
