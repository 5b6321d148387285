// Packs one byte string per (layer, KV head) into one blob, the stored form of summaries:
//
//   u32 magic "PXBP", u32 version 1, u32 count, u32 zero, u64 size[count], payloads in order
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "prefixd/result.h"

namespace prefixd {

std::vector<std::byte> PackBlob(std::span<const std::vector<std::byte>> entries);
// Returns views into `blob`. kCorrupt when it is malformed or does not hold `count` entries.
Result<std::vector<std::span<const std::byte>>> UnpackBlob(std::span<const std::byte> blob,
                                                           size_t count);

}  // namespace prefixd
