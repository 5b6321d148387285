// Rows that follow from the tokens up to them, as FillRow's do, but of finite elements, so that
// they can be stored in 8 bits; and what is read of them then.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "storage/row_encoding.h"
#include "storage/stored_part.h"
#include "tests/storage/store_fixture.h"

namespace prefixd::storage {

inline std::vector<std::byte> FiniteRow(const RowShape& row, uint64_t state, uint32_t layer,
                                        uint32_t head) {
  std::vector<float> x(row.key_dim + row.value_dim);
  uint64_t h = Mix(state ^ (uint64_t{layer} << 32) ^ head);
  for (float& v : x) v = float(int64_t(h = Mix(h)) >> 40) * 0x1p-20f;
  x[row.key_dim / 2] *= 20;  // a channel that stands out
  std::vector<std::byte> out(row.bytes());
  FromFloat(row.dtype, x, out.data());
  return out;
}

// What comes back of a row that was stored as kInt8.
inline std::vector<std::byte> ThroughInt8(const RowShape& row, std::span<const std::byte> given) {
  RowEncoder encoder(row);
  const auto stored = encoder.Encode(given).rows;
  std::vector<std::byte> out(row.bytes());
  DecodeInt8(row.dtype, stored.first(4 + row.key_dim), out.data());
  DecodeInt8(row.dtype, stored.subspan(4 + row.key_dim), out.data() + row.key_bytes());
  return out;
}

// As they are put.
inline RowFn FiniteRows(const RowShape& row, std::span<const uint32_t> tokens) {
  return [row, states = States(tokens)](uint32_t t, uint32_t layer, uint32_t head,
                                        std::span<std::byte> out) {
    const auto given = FiniteRow(row, states[t], layer, head);
    std::copy(given.begin(), given.end(), out.begin());
  };
}

// As they are read where they lie so.
inline RowFn FiniteRows(const RowShape& row, std::span<const uint32_t> tokens,
                        std::span<const StoredPart> parts) {
  std::vector<RowEncoding> encodings;
  for (const StoredPart& part : parts) encodings.resize(part.tokens.end, part.encoding);
  return [row, given = FiniteRows(row, tokens), encodings = std::move(encodings)](
             uint32_t t, uint32_t layer, uint32_t head, std::span<std::byte> out) {
    given(t, layer, head, out);
    if (encodings.at(t) != RowEncoding::kInt8) return;
    const auto read = ThroughInt8(row, out);
    std::copy(read.begin(), read.end(), out.begin());
  };
}

}  // namespace prefixd::storage
