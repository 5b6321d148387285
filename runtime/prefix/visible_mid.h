// Computes progressive windows: how much of the mid region a layer may retrieve from.
#pragma once

#include <cstdint>

#include "prefixd/partition.h"
#include "prefixd/policy.h"

namespace prefixd {

// Returns the part of the mid region that is visible at `layer` in a progressive window (// [PrHS]
// eq. 15): nothing is hidden below layer floor(3 L / 4), nor with phi = 1. t: the prefix's length.
TokenRange VisibleMid(const StepPolicy::Window& window, uint32_t layer, uint32_t n_layers,
                      const Partition& partition);

}  // namespace prefixd
