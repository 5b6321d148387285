// Computes rows from the tokens up to them, as FillRow does, but of finite elements, so that they
// can be stored in 8 bits; and the rows that a read of those returns.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "attention/rows/rows.h"
#include "prefixd/stored_part.h"
#include "storage/segment/row_encoding.h"
#include "tests/storage/store_fixture.h"

namespace prefixd::storage {

// Writes row.bytes() to `out`; `x` is scratch.
inline void FillFiniteRow(const RowShape& row, uint64_t state, uint32_t layer, uint32_t head,
                          std::vector<float>& x, std::span<std::byte> out) {
  x.resize(row.key_dim + row.value_dim);
  uint64_t h = Mix(state ^ (uint64_t{layer} << 32) ^ head);
  for (size_t i = 0; i < x.size(); ++i) {  // 24 bits each, two of one number
    x[i] = float(int64_t(i % 2 == 0 ? h = Mix(h) : h << 32) >> 40) * 0x1p-20f;
  }
  x[row.key_dim / 2] *= 20;  // a channel that stands out
  FromFloat(row.dtype, x, out.data());
}

inline std::vector<std::byte> FiniteRow(const RowShape& row, uint64_t state, uint32_t layer,
                                        uint32_t head) {
  std::vector<float> x;
  std::vector<std::byte> out(row.bytes());
  FillFiniteRow(row, state, layer, head, x, out);
  return out;
}

// Turns a row into what a read returns where it was stored as kInt8.
inline void PassThroughInt8(RowEncoder& encoder, const RowShape& row, std::span<std::byte> bytes) {
  const auto stored = encoder.Encode(row, bytes).rows;
  DecodeInt8(row.dtype, stored.first(4 + row.key_dim), bytes.data());
  DecodeInt8(row.dtype, stored.subspan(4 + row.key_dim), bytes.data() + row.key_bytes());
}

inline std::vector<std::byte> ThroughInt8(const RowShape& row, std::span<const std::byte> given) {
  RowEncoder encoder;
  std::vector<std::byte> out(given.begin(), given.end());
  PassThroughInt8(encoder, row, out);
  return out;
}

// Returns the rows as they are put. One thread at a time calls it.
inline RowFn FiniteRows(const RowShape& row, std::span<const uint32_t> tokens) {
  return [row, states = States(tokens), x = std::vector<float>()](
             uint32_t t, uint32_t layer, uint32_t head, std::span<std::byte> out) mutable {
    FillFiniteRow(row, states[t], layer, head, x, out);
  };
}

// Returns the rows as a read returns them from kInt8.
inline RowFn FiniteRows(const RowShape& row, std::span<const uint32_t> tokens,
                        std::span<const StoredPart> parts) {
  std::vector<RowEncoding> encodings;
  for (const StoredPart& part : parts) encodings.resize(part.tokens.end, part.encoding);
  return [row, given = FiniteRows(row, tokens), encoder = RowEncoder(),
          encodings = std::move(encodings)](uint32_t t, uint32_t layer, uint32_t head,
                                            std::span<std::byte> out) mutable {
    given(t, layer, head, out);
    if (encodings.at(t) == RowEncoding::kInt8) PassThroughInt8(encoder, row, out);
  };
}

}  // namespace prefixd::storage
