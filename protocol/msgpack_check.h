// Checks MessagePack bytes before a parser reads them: exactly one value, nesting bounded, every
// declared length within the bytes that are there. Without the check a few hostile bytes could make
// the parser recurse deeply or allocate gigabytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "prefixd/result.h"

namespace prefixd::wire {

// kInvalidArgument names the byte at which the value is malformed. Uses memory of a fixed size.
// `memory`, unless null, grows by about what the unpacked value takes.
Status CheckMsgpack(std::span<const std::byte> bytes, uint32_t max_depth,
                    uint64_t* memory = nullptr);

}  // namespace prefixd::wire
