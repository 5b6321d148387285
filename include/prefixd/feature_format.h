// Describes how features of single tokens are stored beside rows
// (attention/estimators/stored_features.h).
#pragma once

#include <cstddef>
#include <cstdint>

namespace prefixd {

enum class FeatureScale : uint8_t { kLinear = 0, kLog = 1 };

struct FeatureFormat {
  uint8_t bits = 8;  // 8 or 16
  FeatureScale scale = FeatureScale::kLinear;

  size_t RowBytes(uint32_t d_phi) const { return size_t{d_phi} * bits / 8; }
  double steps() const { return bits == 8 ? 255 : 65535; }
  // Range of the log scale below m, in nats.
  double range() const { return bits == 8 ? 16 : 64; }
  // Linear: largest error of exp(log phi - m). Log: largest error of log phi - m within the range;
  // features below the range, exp(-range()) at most, become 0.
  double error() const {
    return scale == FeatureScale::kLinear ? 0.5 / steps() : 0.5 * range() / (steps() - 1);
  }
  bool operator==(const FeatureFormat&) const = default;
};

}  // namespace prefixd
