// How the tokens of a stored prefix lie: what a reader needs to know to ask well.
//
// Thread-safety: plain values and pure functions.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "prefixd/partition.h"
#include "prefixd/result.h"

namespace prefixd {

// How the rows of a segment are encoded on the disk. Above storage nobody notices: reads give rows
// back in the dtype they were put in. docs/format.md has the bytes and the errors measured.
enum class RowEncoding : uint8_t {
  kAsGiven = 0,  // the geometry's dtype, bit for bit
  kInt8 = 1,
};
std::string_view RowEncodingName(RowEncoding encoding);  // "as_given", "int8"
Result<RowEncoding> RowEncodingFromName(std::string_view name);

// What encoding changed: the distance between a row as it is read and as it was given, relative to
// the norm of the given one, apart for keys and values; the largest and the root of the mean square
// over all rows of a segment. Zero where rows are kept as given.
struct EncodingError {
  float key_max = 0, key_rms = 0, value_max = 0, value_rms = 0;
  bool operator==(const EncodingError&) const = default;
};

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

}  // namespace prefixd
