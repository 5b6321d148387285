#include "storage/segment/row_encoding.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>

#include "attention/rows/rows.h"

namespace prefixd::storage {
namespace {

constexpr float kLargest = 127;
constexpr uint32_t kInfBits = 0x7f800000;

// Returns the bits of the largest magnitude; values from kInfBits on mean that x holds NaN or Inf.
uint32_t LargestBits(std::span<const float> x) {
  uint32_t largest = 0;
  for (const float v : x) largest = std::max(largest, std::bit_cast<uint32_t>(v) & 0x7fffffffu);
  return largest;
}

// The scale is never so small that an element would need more than 127 steps, nor so large that 127
// steps overflow a float.
float ScaleFor(float largest) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  float scale = largest / kLargest;
  if (double{scale} * (kLargest + 0.5) < double{largest}) scale = std::nextafter(scale, kInf);
  if (scale * kLargest == kInf) scale = std::nextafter(scale, 0.0f);
  return scale;
}

void Quantize(std::span<const float> x, float scale, int8_t* out) {
  if (scale < FLT_MIN) {  // 1 / scale may overflow a float
    for (size_t i = 0; i < x.size(); ++i) {
      const double steps = scale == 0 ? 0 : std::nearbyint(double{x[i]} / double{scale});
      out[i] = static_cast<int8_t>(std::clamp(steps, -127.0, 127.0));
    }
    return;
  }
  // Adding 1.5 * 2^23 leaves the nearest whole number, ties to even, in the low bits.
  constexpr float kRound = 12582912.0f;
  const float inverse = 1 / scale;
  for (size_t i = 0; i < x.size(); ++i) {
    const float steps = std::min(std::max(x[i] * inverse, -kLargest), kLargest);
    out[i] = static_cast<int8_t>(std::bit_cast<int32_t>(steps + kRound) -
                                 std::bit_cast<int32_t>(kRound));
  }
}

// Returns |a - b|^2 / |a|^2, for any magnitude of finite elements; 0 where a is zero.
double RelativeSquare(std::span<const float> a, std::span<const float> b, float largest) {
  if (largest == 0) return 0;
  constexpr size_t kLanes = 8;
  const bool tiny = largest < FLT_MIN;
  const float unit = tiny ? 0 : 1 / largest;
  std::array<float, kLanes> difference{}, norm{};
  const auto add = [&](size_t i, size_t lane) {
    const float x = a[i] * unit, d = b[i] * unit - x;
    difference[lane] += d * d;
    norm[lane] += x * x;
  };
  if (!tiny) {
    const size_t whole = a.size() / kLanes * kLanes;
    for (size_t i = 0; i < whole; i += kLanes) {
      for (size_t lane = 0; lane < kLanes; ++lane) add(i + lane, lane);
    }
    for (size_t i = whole; i < a.size(); ++i) add(i, 0);
  } else {
    for (size_t i = 0; i < a.size(); ++i) {
      const double x = double{a[i]} / double{largest}, d = double{b[i]} / double{largest} - x;
      difference[0] += static_cast<float>(d * d);
      norm[0] += static_cast<float>(x * x);
    }
  }
  double d = 0, n = 0;
  for (size_t lane = 0; lane < kLanes; ++lane) d += difference[lane], n += norm[lane];
  return d / n;
}

}  // namespace

StoredBytes StoredRowBytes(const RowShape& row, RowEncoding encoding) {
  if (encoding == RowEncoding::kAsGiven) {
    return {static_cast<uint32_t>(row.key_bytes()), static_cast<uint32_t>(row.value_bytes())};
  }
  constexpr uint32_t kScaleBytes = sizeof(float);
  return {kScaleBytes + row.key_dim, kScaleBytes + row.value_dim};
}

bool Plausible(const EncodingError& e) {
  const auto all = {e.key_max, e.key_rms, e.value_max, e.value_rms};
  return std::all_of(all.begin(), all.end(), [](float x) { return std::isfinite(x) && x >= 0; });
}

EncodingError Combine(const EncodingError& a, uint64_t n_a, const EncodingError& b, uint64_t n_b) {
  const double n = double(n_a) + double(n_b);
  const auto rms = [&](double x, double y) {
    return static_cast<float>(std::sqrt((x * x * double(n_a) + y * y * double(n_b)) / n));
  };
  if (n == 0) return {};
  return {std::max(a.key_max, b.key_max), rms(a.key_rms, b.key_rms),
          std::max(a.value_max, b.value_max), rms(a.value_rms, b.value_rms)};
}

void DecodeInt8(DType dtype, std::span<const std::byte> stored, std::byte* out) {
  float scale;
  std::memcpy(&scale, stored.data(), sizeof(scale));
  const auto* elements = reinterpret_cast<const int8_t*>(stored.data() + sizeof(scale));
  const size_t n = stored.size() - sizeof(scale);
  if (dtype == DType::kBf16) {
    // This is FloatToBf16 without its NaN case: the product is finite.
    for (size_t i = 0; i < n; ++i) {
      const auto bits = std::bit_cast<uint32_t>(static_cast<float>(elements[i]) * scale);
      const auto rounded = static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
      std::memcpy(out + i * sizeof(rounded), &rounded, sizeof(rounded));
    }
    return;
  }
  constexpr size_t kRun = 256;
  std::array<float, kRun> run;
  for (size_t at = 0; at < n; at += kRun) {
    const size_t m = std::min(kRun, n - at);
    for (size_t i = 0; i < m; ++i) run[i] = static_cast<float>(elements[at + i]) * scale;
    FromFloat(dtype, std::span(run).first(m), out + at * DTypeBytes(dtype));
  }
}

void RowEncoder::Sum::Add(double relative_square) {
  squares += relative_square;
  max = std::max(max, relative_square);
}

bool RowEncoder::EncodePart(DType dtype, const std::byte* given, uint32_t dim, std::byte* out,
                            Sum& sum) {
  given_.resize(dim);
  ToFloat(dtype, given, given_);
  const uint32_t largest_bits = LargestBits(given_);
  if (largest_bits >= kInfBits) return false;
  const auto largest = std::bit_cast<float>(largest_bits);
  const float scale = ScaleFor(largest);
  std::memcpy(out, &scale, sizeof(scale));
  Quantize(given_, scale, reinterpret_cast<int8_t*>(out + sizeof(scale)));
  // The error is that of a reader's values, including the rounding to the given dtype.
  decoded_.resize(dim * DTypeBytes(dtype));
  back_.resize(dim);
  DecodeInt8(dtype, {out, sizeof(scale) + dim}, decoded_.data());
  ToFloat(dtype, decoded_.data(), back_);
  sum.Add(RelativeSquare(given_, back_, largest));
  return true;
}

RowEncoder::Encoded RowEncoder::Encode(const RowShape& row, std::span<const std::byte> rows) {
  const StoredBytes stored = StoredRowBytes(row, RowEncoding::kInt8);
  const size_t n = rows.size() / row.bytes();
  encoded_.resize(n * (stored.key + stored.value));
  const Sum key_before = key_, value_before = value_;
  for (size_t i = 0; i < n; ++i) {
    const std::byte* given = rows.data() + i * row.bytes();
    std::byte* out = encoded_.data() + i * (stored.key + stored.value);
    if (!EncodePart(row.dtype, given, row.key_dim, out, key_) ||
        !EncodePart(row.dtype, given + row.key_bytes(), row.value_dim, out + stored.key, value_)) {
      key_ = key_before;
      value_ = value_before;
      return {{}, i};
    }
  }
  n_rows_ += n;
  return {encoded_, std::nullopt};
}

EncodingError RowEncoder::error() const {
  const auto largest = [](const Sum& s) { return static_cast<float>(std::sqrt(s.max)); };
  const auto rms = [&](const Sum& s) {
    return static_cast<float>(std::sqrt(s.squares / double(std::max<uint64_t>(n_rows_, 1))));
  };
  return {largest(key_), rms(key_), largest(value_), rms(value_)};
}

}  // namespace prefixd::storage
