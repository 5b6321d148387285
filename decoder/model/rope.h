// Rotates heads by their position, in rotate-half form as Hugging Face does. Frequencies and angles
// are float32, so that keys of long prompts agree with Hugging Face's.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "decoder/checkpoint/config.h"

namespace prefixd::decoder {

// Holds cosines and sines of consecutive positions: [n][dim / 2].
struct RopeTable {
  uint32_t dim = 0;
  std::vector<float> cos, sin;
};

class Rope {
 public:
  Rope(const RopeConfig& config, uint32_t dim);

  RopeTable Table(uint32_t first_position, uint32_t n) const;
  std::span<const float> inverse_frequencies() const { return inverse_frequencies_; }

 private:
  std::vector<float> inverse_frequencies_;  // [dim / 2]
};

// Rotates heads: [n][n_heads][dim] in place, row i by position i of the table.
void ApplyRope(const RopeTable& table, uint32_t n, uint32_t n_heads, std::span<float> heads);

}  // namespace prefixd::decoder
