// Uniform quantisers of coordinates, and which coordinate gets how many digits. Internal to index/.
//
// Thread-safety: pure functions.
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "index/codes/key_codes.h"

namespace prefixd::index {

// Digits of each axis, most error first.
std::vector<uint8_t> AllocateDigits(std::span<const double> variances, uint32_t fields);

// x ~ low + step * C, C = 0 .. levels - 1
struct Steps {
  double low = 0, step = 0, error = std::numeric_limits<double>::infinity();
};
// Least squares in turns with assignment, from several widths; sums in float32. step 0: all of x
// is alike. x: at least one, finite.
Steps FitSteps(std::span<const float> x, uint32_t levels);

}  // namespace prefixd::index
