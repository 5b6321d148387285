#include "attention/estimators/stored_features.h"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <cstring>
#include <limits>

namespace prefixd {
namespace {

// Code 0 is "none"; on the log scale 1 is the range's end and the largest code is m itself.
uint32_t Quantise(const FeatureFormat& format, double relative_log) {
  const double steps = format.steps();
  const double below = std::min(relative_log, 0.0);
  if (format.scale == FeatureScale::kLinear) {
    return static_cast<uint32_t>(std::lround(std::exp(below) * steps));
  }
  const double code = steps + below * (steps - 1) / format.range();
  return code < 0.5 ? 0 : static_cast<uint32_t>(std::lround(code));
}

template <typename Code>
void Decode(const FeatureFormat& format, const std::byte* codes, std::span<float> weights) {
  std::vector<Code> code(weights.size());
  std::memcpy(code.data(), codes, code.size() * sizeof(Code));
  if (format.scale == FeatureScale::kLinear) {
    const float step = static_cast<float>(1 / format.steps());
    for (size_t i = 0; i < code.size(); ++i) weights[i] = static_cast<float>(code[i]) * step;
    return;
  }
  const double nats = format.range() / (format.steps() - 1);
  if constexpr (sizeof(Code) == 1) {
    float table[256] = {};
    for (int c = 1; c < 256; ++c) table[c] = static_cast<float>(std::exp((c - 255) * nats));
    for (size_t i = 0; i < code.size(); ++i) weights[i] = table[code[i]];
  } else {
    for (size_t i = 0; i < code.size(); ++i) {
      weights[i] =
          code[i] == 0 ? 0.0f : static_cast<float>(std::exp((code[i] - format.steps()) * nats));
    }
  }
}

}  // namespace

void EncodeFeatures(const FeatureFormat& format, std::span<const float> log_phi,
                    std::span<const float> m, std::span<std::byte> out) {
  assert(format.bits == 8 || format.bits == 16);
  assert(out.size() == log_phi.size() * format.bits / 8 && log_phi.size() % m.size() == 0);
  for (size_t i = 0; i < log_phi.size(); ++i) {
    const float base = m[i % m.size()];
    const uint32_t code =
        std::isfinite(base) ? Quantise(format, double{log_phi[i]} - double{base}) : 0;
    if (format.bits == 8) {
      out[i] = static_cast<std::byte>(code);
    } else {
      const uint16_t wide = static_cast<uint16_t>(code);
      std::memcpy(out.data() + 2 * i, &wide, sizeof wide);
    }
  }
}

void DecodeFeatures(const FeatureFormat& format, const std::byte* codes, std::span<float> weights) {
  if (format.bits == 8) {
    Decode<uint8_t>(format, codes, weights);
  } else {
    Decode<uint16_t>(format, codes, weights);
  }
}

}  // namespace prefixd
