// How the tokens of a stored prefix lie: what a reader needs to know to ask well.
//
// Thread-safety: plain values and pure functions.
#pragma once

#include <cstdint>
#include <span>

#include "attention/kv_shape.h"
#include "attention/partition.h"
#include "storage/row_encoding.h"

namespace prefixd::storage {

// Consecutive tokens that lie in one segment; the parts of a prefix follow one another.
struct StoredPart {
  TokenRange tokens;
  RowEncoding encoding = RowEncoding::kAsGiven;
  uint32_t chunk_tokens = 0;  // of the settled layout, counted from tokens.begin; 0: arrival
  bool operator==(const StoredPart&) const = default;
};

// Where a sequential read that begins at `begin` had best end: `max_tokens` further, but in the
// settled layout at the end of a chunk, because part of a chunk costs the pages of all of it; and
// never beyond `begin`'s part. The prefix's end when `begin` lies behind it.
uint32_t RunEnd(std::span<const StoredPart> parts, uint32_t begin, uint32_t max_tokens);

// Bytes that the rows of these tokens take where they are stored.
uint64_t RowsBytes(std::span<const StoredPart> parts, const RowShape& row, TokenRange tokens);
// ids: ascending.
uint64_t RowsBytes(std::span<const StoredPart> parts, const RowShape& row,
                   std::span<const uint32_t> ids);

// What a row takes on the average of all parts: what budgets count tokens in (spec §4: `b` is what
// is stored). Of no tokens: as given.
double MeanRowBytes(std::span<const StoredPart> parts, const RowShape& row);

}  // namespace prefixd::storage
