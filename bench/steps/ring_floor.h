// Measures what waking another process and being woken by it costs, with nothing between: an empty
// call through a ring (protocol/step_ring.h), answered by a process that does nothing else.
#pragma once

#include <cstdint>
#include <vector>

#include "prefixd/result.h"

namespace prefixd::bench {

// Returns the microseconds of each call. spins: both sides poll and nobody is woken.
Result<std::vector<double>> RingFloor(uint32_t calls, uint32_t pause_us, bool spins);

}  // namespace prefixd::bench
