#include "attention/kv_shape.h"

#include <bit>
#include <cmath>
#include <cstring>

#include "attention/kernels.h"

namespace prefixd {
namespace {

constexpr uint32_t kMaxLayers = 1024;
constexpr uint32_t kMaxHeads = 1024;
constexpr uint32_t kMaxDim = 1024;
constexpr uint32_t kMaxGroup = 64;

Status CheckRange(const char* name, uint32_t value, uint32_t max) {
  if (value >= 1 && value <= max) return {};
  return InvalidArgument(std::string(name) + " is " + std::to_string(value) + "; must be 1.." +
                         std::to_string(max));
}

Status CheckLayer(uint32_t index, const LayerGeometry& layer) {
  const std::string where = "layer " + std::to_string(index) + ": ";
  if (!std::isfinite(layer.scale) || layer.scale <= 0) {
    return InvalidArgument(where + "scale must be positive and finite, usually 1/sqrt(key_dim)");
  }
  if (!std::isfinite(layer.softcap) || layer.softcap < 0) {
    return InvalidArgument(where + "softcap must be 0 (none) or positive and finite");
  }
  return {};
}

}  // namespace

std::string_view DTypeName(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return "f32";
    case DType::kF16:
      return "f16";
    case DType::kBf16:
      return "bf16";
  }
  return "unknown";
}

Result<DType> DTypeFromName(std::string_view name) {
  for (DType dtype : {DType::kF32, DType::kF16, DType::kBf16}) {
    if (DTypeName(dtype) == name) return dtype;
  }
  return InvalidArgument("unknown dtype '" + std::string(name) + "'; known: f32, f16, bf16");
}

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

Status KvGeometry::Validate() const {
  PREFIXD_TRY(CheckRange("n_layers", n_layers, kMaxLayers));
  PREFIXD_TRY(CheckRange("n_q_heads", n_q_heads, kMaxHeads));
  PREFIXD_TRY(CheckRange("n_kv_heads", n_kv_heads, kMaxHeads));
  PREFIXD_TRY(CheckRange("key_dim", key_dim, kMaxDim));
  PREFIXD_TRY(CheckRange("value_dim", value_dim, kMaxDim));
  if (n_q_heads % n_kv_heads != 0) {
    return InvalidArgument("n_kv_heads (" + std::to_string(n_kv_heads) +
                           ") must divide n_q_heads (" + std::to_string(n_q_heads) + ")");
  }
  PREFIXD_TRY(CheckRange("group size n_q_heads / n_kv_heads", group_size(), kMaxGroup));
  if (DTypeName(dtype) == "unknown") {
    return InvalidArgument("dtype is none of f32, f16, bf16");
  }
  if (layers.size() != n_layers) {
    return InvalidArgument("layers has " + std::to_string(layers.size()) +
                           " entries; n_layers is " + std::to_string(n_layers));
  }
  for (uint32_t i = 0; i < n_layers; ++i) PREFIXD_TRY(CheckLayer(i, layers[i]));
  return {};
}

}  // namespace prefixd
