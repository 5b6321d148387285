#include "tensors/tensor_type.h"

#include <array>

namespace prefixd {
namespace {

struct Row {
  std::string_view name;
  uint32_t bits;
};

// This table is indexed by TensorType.
constexpr std::array<Row, 20> kTypes = {{
    {"BOOL", 8}, {"F4", 4},      {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"U8", 8},
    {"I8", 8},   {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"I16", 16},
    {"U16", 16}, {"F16", 16},    {"BF16", 16},   {"I32", 32},    {"U32", 32},
    {"F32", 32}, {"C64", 64},    {"F64", 64},    {"I64", 64},    {"U64", 64},
}};
static_assert(static_cast<size_t>(TensorType::kU64) + 1 == kTypes.size());

}  // namespace

std::string_view TensorTypeName(TensorType type) { return kTypes[static_cast<size_t>(type)].name; }

std::optional<TensorType> TensorTypeFromName(std::string_view name) {
  for (size_t i = 0; i < kTypes.size(); ++i) {
    if (kTypes[i].name == name) return static_cast<TensorType>(i);
  }
  return std::nullopt;
}

uint32_t TensorTypeBits(TensorType type) { return kTypes[static_cast<size_t>(type)].bits; }

std::optional<DType> FloatDType(TensorType type) {
  switch (type) {
    case TensorType::kF32:
      return DType::kF32;
    case TensorType::kF16:
      return DType::kF16;
    case TensorType::kBf16:
      return DType::kBf16;
    default:
      return std::nullopt;
  }
}

TensorType TensorTypeOf(DType dtype) {
  switch (dtype) {
    case DType::kF16:
      return TensorType::kF16;
    case DType::kBf16:
      return TensorType::kBf16;
    case DType::kF32:
      break;
  }
  return TensorType::kF32;
}

}  // namespace prefixd
