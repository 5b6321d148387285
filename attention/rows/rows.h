// Defines the views through which kernels read rows, and conversions between storage dtypes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "prefixd/kv_shape.h"
#include "prefixd/row_ref.h"

namespace prefixd {

// Round to nearest even; NaN stays NaN, overflow becomes infinity.
float Bf16ToFloat(uint16_t bits);
uint16_t FloatToBf16(float value);
float F16ToFloat(uint16_t bits);
uint16_t FloatToF16(float value);
// ToFloat and its inverse. `src` holds dst.size() elements of `dtype`; no alignment is required.
void ToFloat(DType dtype, const std::byte* src, std::span<float> dst);
void FromFloat(DType dtype, std::span<const float> src, std::byte* dst);

// Borrowed rows: row i starts at data + i * stride (stride >= shape.bytes()), or, where `refs` is
// set, lies where refs[i] says; then data is null and stride 0. Owns nothing.
struct RowsView {
  const std::byte* data = nullptr;
  size_t count = 0;
  size_t stride = 0;
  RowShape shape;
  const RowRef* refs = nullptr;  // [count]

  const std::byte* key(size_t i) const { return refs ? refs[i].key : data + i * stride; }
  const std::byte* value(size_t i) const {
    return refs ? refs[i].value : data + i * stride + shape.key_bytes();
  }
  RowsView Sub(size_t begin, size_t n) const {
    if (refs) return {nullptr, n, 0, shape, refs + begin};
    return {data + begin * stride, n, stride, shape};
  }
};

// Views rows in place, in the order of `refs`.
inline RowsView ScatteredRows(std::span<const RowRef> refs, RowShape shape) {
  return {nullptr, refs.size(), 0, shape, refs.data()};
}

}  // namespace prefixd
