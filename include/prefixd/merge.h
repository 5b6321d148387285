// Merges two partial attention states into one softmax: all that a decoder needs to join prefixd's
// answer with the state of its own tokens (docs/mathematics.md).
//
// Thread-safety: a pure function.
#pragma once

#include <span>

namespace prefixd {

// Merges the partial state (y_b, lse_b) into (y_a, lse_a), in place (docs/mathematics.md).
//   y: [value_dim]. Either side may be empty (lse = -inf).
void MergeStates(std::span<float> y_a, float* lse_a, std::span<const float> y_b, float lse_b);

}  // namespace prefixd
