#include "attention/rows/finite_check.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

namespace prefixd {
namespace {

// Returns the index of the first non-finite element, or n.
size_t FirstBad(std::span<const float> x) {
  for (size_t i = 0; i < x.size(); ++i) {
    if (!std::isfinite(x[i])) return i;
  }
  return x.size();
}

Error BadElement(std::string_view tensor, std::string_view unit, size_t row, size_t element,
                 float value) {
  return InvalidArgument(
      std::string(tensor) + ": " + std::string(unit) + " " + std::to_string(row) + " holds " +
      (std::isnan(value) ? "NaN" : "infinity") + " at element " + std::to_string(element));
}

// NaN and Inf have all exponent bits set, so the largest exponent field decides. This loop touches
// the caller's memory first, mostly far from this core, so it prefetches the next block while it
// checks one: the hardware's prefetching ends with every page.
template <typename Bits>
bool ExponentsBelow(Bits exponent, const std::byte* bytes, size_t n) {
  constexpr size_t kBlockBytes = 2048, kLineBytes = 64, kItems = kBlockBytes / sizeof(Bits);
  Bits largest = 0;
  for (size_t begin = 0; begin < n; begin += kItems) {
    const std::byte* block = bytes + begin * sizeof(Bits);
    const size_t size = std::min(kItems, n - begin);
    for (size_t at = 0; at < size * sizeof(Bits); at += kLineBytes) {
      __builtin_prefetch(block + kBlockBytes + at);
    }
    for (size_t i = 0; i < size; ++i) {
      Bits bits;
      std::memcpy(&bits, block + i * sizeof(Bits), sizeof(Bits));
      largest = std::max(largest, static_cast<Bits>(bits & exponent));
    }
  }
  return largest < exponent;
}

}  // namespace

bool AllFinite(DType dtype, const std::byte* bytes, size_t n) {
  if (dtype == DType::kF32) return ExponentsBelow<int32_t>(0x7f800000, bytes, n);
  return ExponentsBelow<int16_t>(dtype == DType::kBf16 ? 0x7f80 : 0x7c00, bytes, n);
}

Status CheckQueries(std::span<const float> queries, size_t n, uint32_t key_dim) {
  for (size_t g = 0; g < n; ++g) {
    const std::span<const float> query = queries.subspan(g * key_dim, key_dim);
    // A sum is non-finite whenever an element is, and costs one addition each.
    float sum = 0;
    for (float x : query) sum += x - x;
    if (sum == 0) continue;
    const size_t bad = FirstBad(query);
    return BadElement("queries", "query head", g, bad, query[bad]);
  }
  return {};
}

Error ExplainNonFinite(std::span<const NamedRows> tensors) {
  for (const NamedRows& tensor : tensors) {
    const RowShape& shape = tensor.rows.shape;
    std::vector<float> key(shape.key_dim), value(shape.value_dim);
    for (size_t i = 0; i < tensor.rows.count; ++i) {
      ToFloat(shape.dtype, tensor.rows.key(i), key);
      if (const size_t bad = FirstBad(key); bad < key.size()) {
        return BadElement(std::string(tensor.name) + " key", "row", i, bad, key[bad]);
      }
      ToFloat(shape.dtype, tensor.rows.value(i), value);
      if (const size_t bad = FirstBad(value); bad < value.size()) {
        return BadElement(std::string(tensor.name) + " value", "row", i, bad, value[bad]);
      }
    }
  }
  return InvalidArgument(
      "scores or outputs overflow float32 although every query, key and value is finite; "
      "check the scale and the stored rows");
}

}  // namespace prefixd
