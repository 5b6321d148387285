// Tells how much memory a measurement may take.
#pragma once

#include <cstdint>

namespace prefixd::bench {

// Bytes that a process could take now without others losing theirs; 0: unknown.
uint64_t AvailableMemory();

}  // namespace prefixd::bench
