#include "decoder/model/rope.h"

#include <cmath>
#include <numbers>

namespace prefixd::decoder {
namespace {

// Llama 3 scales frequencies: long waves are slowed by `factor`, short ones kept, those between
// blended.
double Llama3Frequency(double frequency, const RopeConfig& config) {
  const double wavelength = 2 * std::numbers::pi / frequency;
  const double original = config.original_max_positions;
  if (wavelength < original / config.high_freq_factor) return frequency;
  if (wavelength > original / config.low_freq_factor) return frequency / config.factor;
  const double smooth = (original / wavelength - config.low_freq_factor) /
                        (config.high_freq_factor - config.low_freq_factor);
  return (1 - smooth) * frequency / config.factor + smooth * frequency;
}

}  // namespace

Rope::Rope(const RopeConfig& config, uint32_t dim) {
  for (uint32_t i = 0; i < dim; i += 2) {
    double frequency = std::pow(config.theta, -static_cast<double>(i) / dim);
    if (config.type == RopeType::kLinear) frequency /= config.factor;
    if (config.type == RopeType::kLlama3) frequency = Llama3Frequency(frequency, config);
    inverse_frequencies_.push_back(static_cast<float>(frequency));
  }
}

RopeTable Rope::Table(uint32_t first_position, uint32_t n) const {
  RopeTable table;
  table.dim = static_cast<uint32_t>(2 * inverse_frequencies_.size());
  table.cos.reserve(n * inverse_frequencies_.size());
  table.sin.reserve(n * inverse_frequencies_.size());
  for (uint32_t i = 0; i < n; ++i) {
    for (const float frequency : inverse_frequencies_) {
      const float angle = static_cast<float>(first_position + i) * frequency;
      table.cos.push_back(std::cos(angle));
      table.sin.push_back(std::sin(angle));
    }
  }
  return table;
}

void ApplyRope(const RopeTable& table, uint32_t n, uint32_t n_heads, std::span<float> heads) {
  const uint32_t half = table.dim / 2;
  for (uint32_t i = 0; i < n; ++i) {
    const float* cos = table.cos.data() + size_t{i} * half;
    const float* sin = table.sin.data() + size_t{i} * half;
    for (uint32_t h = 0; h < n_heads; ++h) {
      float* x = heads.data() + (size_t{i} * n_heads + h) * table.dim;
      for (uint32_t j = 0; j < half; ++j) {
        const float a = x[j], b = x[j + half];
        x[j] = a * cos[j] - b * sin[j];
        x[j + half] = b * cos[j] + a * sin[j];
      }
    }
  }
}

}  // namespace prefixd::decoder
