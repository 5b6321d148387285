#include "storage/row_encoding.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>

namespace prefixd::storage {
namespace {

constexpr float kMaxCode = 127;

float LoadElement(DType dtype, const std::byte* at) {
  if (dtype == DType::kF32) {
    float x;
    std::memcpy(&x, at, sizeof(x));
    return x;
  }
  uint16_t bits;
  std::memcpy(&bits, at, sizeof(bits));
  return dtype == DType::kBf16 ? Bf16ToFloat(bits) : F16ToFloat(bits);
}

// The largest finite element: the rounding of a scale must not make an infinity next to it.
float Largest(DType dtype) {
  if (dtype == DType::kF32) return std::numeric_limits<float>::max();
  return dtype == DType::kBf16 ? Bf16ToFloat(0x7f7f) : 65504.0f;
}

void StoreElement(DType dtype, float x, std::byte* at) {
  x = std::clamp(x, -Largest(dtype), Largest(dtype));
  if (dtype == DType::kF32) {
    std::memcpy(at, &x, sizeof(x));
    return;
  }
  const uint16_t bits = dtype == DType::kBf16 ? FloatToBf16(x) : FloatToF16(x);
  std::memcpy(at, &bits, sizeof(bits));
}

double Ratio(double lost, double given) { return given > 0 ? std::sqrt(lost / given) : 0.0; }

}  // namespace

std::string_view EncodingName(RowEncoding encoding) {
  return encoding == RowEncoding::kInt8 ? "int8" : "as-given";
}

Result<RowEncoding> EncodingFromName(std::string_view name) {
  if (name == "as-given") return RowEncoding::kAsGiven;
  if (name == "int8") return RowEncoding::kInt8;
  return InvalidArgument("rows are stored as-given or as int8, not '" + std::string(name) + "'");
}

StoredBytes StoredRowBytes(const RowShape& row, RowEncoding encoding) {
  if (encoding == RowEncoding::kAsGiven) {
    return {static_cast<uint32_t>(row.key_bytes()), static_cast<uint32_t>(row.value_bytes())};
  }
  constexpr uint32_t kScale = sizeof(float);
  return {kScale + row.key_dim, kScale + row.value_dim};
}

std::span<const std::byte> RowEncoder::Encode(std::span<const std::byte> rows) {
  if (encoding_ == RowEncoding::kAsGiven) return rows;
  const StoredBytes stored = StoredRowBytes(row_, encoding_);
  const size_t n = rows.size() / row_.bytes();
  out_.resize(n * (stored.key + stored.value));
  floats_.resize(std::max(row_.key_dim, row_.value_dim));
  std::byte* out = out_.data();
  for (size_t i = 0; i < n; ++i) {
    const std::byte* given = rows.data() + i * row_.bytes();
    EncodeItem(given, row_.key_dim, out, key_);
    out += stored.key;
    EncodeItem(given + row_.key_bytes(), row_.value_dim, out, value_);
    out += stored.value;
  }
  return out_;
}

void RowEncoder::EncodeItem(const std::byte* given, uint32_t dim, std::byte* out, Sums& sums) {
  const size_t element = DTypeBytes(row_.dtype);
  float largest = 0;
  for (uint32_t j = 0; j < dim; ++j) {
    floats_[j] = LoadElement(row_.dtype, given + j * element);
    largest = std::max(largest, std::fabs(floats_[j]));
  }
  const float scale = largest / kMaxCode;
  std::memcpy(out, &scale, sizeof(scale));
  auto* codes = reinterpret_cast<int8_t*>(out + sizeof(scale));
  for (uint32_t j = 0; j < dim; ++j) {
    const float code = scale > 0 ? std::nearbyint(floats_[j] / scale) : 0;
    codes[j] = static_cast<int8_t>(std::clamp(code, -kMaxCode, kMaxCode));
    std::byte read[sizeof(float)];
    StoreElement(row_.dtype, scale * codes[j], read);
    const double lost = double{LoadElement(row_.dtype, read)} - floats_[j];
    sums.given += double{floats_[j]} * floats_[j];
    sums.lost += lost * lost;
  }
}

EncodingError RowEncoder::error() const {
  return {Ratio(key_.lost, key_.given), Ratio(value_.lost, value_.given)};
}

void DecodeItem(const std::byte* stored, uint32_t dim, DType dtype, std::byte* out) {
  float scale;
  std::memcpy(&scale, stored, sizeof(scale));
  const auto* codes = reinterpret_cast<const int8_t*>(stored + sizeof(scale));
  const size_t element = DTypeBytes(dtype);
  for (uint32_t j = 0; j < dim; ++j) StoreElement(dtype, scale * codes[j], out + j * element);
}

}  // namespace prefixd::storage
