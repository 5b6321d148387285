// Lists the element types of a safetensors file. prefixd computes with F32, F16 and BF16. The
// others are listed so that a file with them can be opened; reading them as floats is refused.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

#include "prefixd/kv_shape.h"

namespace prefixd {

enum class TensorType : uint8_t {
  kBool,
  kF4,
  kF6E2M3,
  kF6E3M2,
  kU8,
  kI8,
  kF8E5M2,
  kF8E4M3,
  kF8E8M0,
  kI16,
  kU16,
  kF16,
  kBf16,
  kI32,
  kU32,
  kF32,
  kC64,
  kF64,
  kI64,
  kU64,
};

// Returns the name used in the file: "F32", "BF16", ...
std::string_view TensorTypeName(TensorType type);
std::optional<TensorType> TensorTypeFromName(std::string_view name);
// Returns the bits of one element (some types are smaller than a byte).
uint32_t TensorTypeBits(TensorType type);
// Returns the dtype that attention/ uses for it; empty for types that prefixd does not compute
// with.
std::optional<DType> FloatDType(TensorType type);
TensorType TensorTypeOf(DType dtype);

}  // namespace prefixd
