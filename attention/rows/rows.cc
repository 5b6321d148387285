#include "attention/rows/rows.h"

#include <bit>
#include <cmath>
#include <cstring>

#include "attention/kernels/kernels.h"

namespace prefixd {

float Bf16ToFloat(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }

uint16_t FloatToBf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  // A NaN whose payload lies in the dropped half must not round to infinity.
  if (std::isnan(value)) return static_cast<uint16_t>((bits >> 16) | 0x0040u);
  const uint32_t to_even = 0x7fffu + ((bits >> 16) & 1u);
  return static_cast<uint16_t>((bits + to_even) >> 16);
}

float F16ToFloat(uint16_t bits) {
  const uint32_t sign = (bits & 0x8000u) << 16;
  const uint32_t magnitude = bits & 0x7fffu;
  if (magnitude >= 0x7c00u) {
    return std::bit_cast<float>(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
  }
  // Moving exponent and mantissa into place leaves a bias of 2^112, for subnormals too.
  const float unsigned_value = std::bit_cast<float>(magnitude << 13) * 0x1p112f;
  return std::bit_cast<float>(std::bit_cast<uint32_t>(unsigned_value) | sign);
}

uint16_t FloatToF16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // >= 65520
  if (magnitude < 0x38800000u) {
    // Below 2^-14: adding 0.5 aligns the mantissa to multiples of 2^-24, rounding to even.
    const float aligned = std::bit_cast<float>(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(aligned) - 0x3f000000u));
  }
  const uint32_t to_even = 0xfffu + ((magnitude >> 13) & 1u);
  return static_cast<uint16_t>(sign | ((magnitude - 0x38000000u + to_even) >> 13));
}

void ToFloat(DType dtype, const std::byte* src, std::span<float> dst) {
  Kernels().to_float(dtype, src, dst.size(), dst.data());
}

void FromFloat(DType dtype, std::span<const float> src, std::byte* dst) {
  if (dtype == DType::kF32) {
    if (!src.empty()) std::memcpy(dst, src.data(), src.size_bytes());
    return;
  }
  for (size_t i = 0; i < src.size(); ++i) {
    const uint16_t bits = dtype == DType::kBf16 ? FloatToBf16(src[i]) : FloatToF16(src[i]);
    std::memcpy(dst + i * sizeof(bits), &bits, sizeof(bits));
  }
}

}  // namespace prefixd
