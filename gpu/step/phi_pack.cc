#include "prefixd/gpu/phi_pack.h"

#include <cassert>

#include "attention/rows/rows.h"

namespace prefixd::gpu {
namespace {

struct Parts {
  uint16_t high, low;
};

Parts Split(float x) {
  const uint16_t high = FloatToBf16(x);
  return {high, FloatToBf16(x - Bf16ToFloat(high))};
}

}  // namespace

void PackWeights(std::span<const float> w, uint32_t n_in, uint32_t n_out, std::span<uint32_t> out) {
  assert(w.size() == size_t{n_in} * n_out && out.size() == PackedWords(n_in, n_out));
  const uint32_t tiles_in = (n_in + kTileIn - 1) / kTileIn;
  for (size_t at = 0; at < out.size(); at += 2) {
    // Half: 0 for high parts, 1 for low.
    const uint32_t lane = at % kTileWords / 4, half = at % 4 / 2;
    const size_t tile = at / kTileWords;
    const uint32_t o = static_cast<uint32_t>(tile / tiles_in) * kTileOut + lane / 4;
    const uint32_t i0 = static_cast<uint32_t>(tile % tiles_in) * kTileIn + 2 * (lane % 4);
    for (uint32_t pair = 0; pair < 2; ++pair) {
      uint32_t word = 0;
      for (uint32_t e = 0; e < 2; ++e) {
        const uint32_t i = i0 + 8 * pair + e;
        if (o >= n_out || i >= n_in) continue;
        const Parts parts = Split(w[size_t{o} * n_in + i]);
        word |= uint32_t{half == 0 ? parts.high : parts.low} << (16 * e);
      }
      out[at + pair] = word;
    }
  }
}

}  // namespace prefixd::gpu
