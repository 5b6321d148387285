// Computes diagnostics of [RC] ([RC] App. H), in float64.
#pragma once

#include <span>

namespace prefixd {

// H_mid = -sum p log p / log n over the scores of the mid region, in [0, 1] [52]; 0 for n < 2.
double NormalizedEntropy(std::span<const float> scores);
// ||a - b||_1 / (||b||_1 + 1e-12): relative error of a against b [53].
double RelativeL1(std::span<const float> a, std::span<const float> b);

}  // namespace prefixd
