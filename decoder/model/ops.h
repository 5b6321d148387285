// Computes the decoder's arithmetic outside attention, float32. Shapes open each comment;
// row-major.
#pragma once

#include <cstdint>
#include <span>

#include "decoder/checkpoint/weights.h"

namespace prefixd::decoder {

// x [n][cols] -> y [n][rows], y = x W^T.
void Linear(const Matrix& weights, std::span<const float> x, uint32_t n, std::span<float> y);

// x, y: [n][weight.size()]; y = x / sqrt(mean(x^2) + eps) * weight. x and y may be the same.
void RmsNorm(std::span<const float> weight, float eps, std::span<const float> x, uint32_t n,
             std::span<float> y);

// gate[i] = silu(gate[i]) * up[i], silu(x) = x / (1 + exp(-x)).
void SwiGlu(std::span<float> gate, std::span<const float> up);

// x[i] += y[i].
void AddTo(std::span<float> x, std::span<const float> y);

}  // namespace prefixd::decoder
