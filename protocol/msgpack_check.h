// A look over MessagePack bytes before a parser touches them: exactly one value, nesting bounded,
// every declared length within the bytes that are there. Without it a few hostile bytes could
// recurse deeply or announce gigabytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "prefixd/result.h"

namespace prefixd::wire {

// kInvalidArgument says at which byte the value is malformed. Allocates nothing that grows.
Status CheckMsgpack(std::span<const std::byte> bytes, uint32_t max_depth);

}  // namespace prefixd::wire
