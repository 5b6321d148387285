// Packs the weights of a key map in the order in which tensor cores read them.
//
// A weight w is kept as two bf16 numbers, high = bf16(w) and low = bf16(w - high), which together
// miss it by at most 2^-18 |w|; activations are split in the same way, and three of the four
// products are summed in float32. So each linear layer adds an error of at most about
//   kSplitError * sum_i |w_i x_i|
// to each output, beside float32's own rounding: some 1e-5 of log phi for maps whose weights are of
// the usual size. A step may subtract features recomputed so as long as more than kNegligibleShare
// (gpu/step/estimator_math.h) of the surrogate mass remains.
//
// Layout: tiles of 16 inputs by 8 outputs, tile (t_out, t_in) at (t_out * tiles_in + t_in) * 128
// words; in a tile 4 words for each of 32 lanes. With r = lane / 4 and c = lane % 4, lane's words
// hold, of output 8 t_out + r, the inputs 16 t_in + {2c, 2c + 1} and {2c + 8, 2c + 9} of `high`,
// then the same of `low`, the smaller input in the lower half. Beyond the matrix: zeros.
//
// Thread-safety: pure functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "prefixd/host_device.h"

namespace prefixd::gpu {

inline constexpr double kSplitError = 3 * 0x1p-18;

inline constexpr uint32_t kTileIn = 16, kTileOut = 8, kTileWords = 128;

PREFIXD_HD constexpr size_t PackedWords(uint32_t n_in, uint32_t n_out) {
  return size_t{(n_in + kTileIn - 1) / kTileIn} * ((n_out + kTileOut - 1) / kTileOut) * kTileWords;
}
// w: [n_out][n_in], the order of attention/estimators/feature_map.h; out: PackedWords(n_in, n_out).
void PackWeights(std::span<const float> w, uint32_t n_in, uint32_t n_out, std::span<uint32_t> out);

}  // namespace prefixd::gpu
