// Describes how the tokens of a stored prefix lie on disk, so that readers can choose efficient
// runs.
//
// Thread-safety: plain values and pure functions.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "prefixd/partition.h"
#include "prefixd/result.h"

namespace prefixd {

// How the rows of a segment are encoded on disk. Layers above storage do not notice: reads return
// rows in the dtype they were put in. docs/format.md has the bytes and the measured errors.
enum class RowEncoding : uint8_t {
  kAsGiven = 0,  // the geometry's dtype, bit for bit
  kInt8 = 1,
};
std::string_view RowEncodingName(RowEncoding encoding);  // "as_given", "int8"
Result<RowEncoding> RowEncodingFromName(std::string_view name);

// The change that encoding made: the distance between a row as read and as given, relative to the
// norm of the given one, for keys and values separately; the largest, and the root mean square over
// all rows of a segment. Zero where rows are kept as given.
struct EncodingError {
  float key_max = 0, key_rms = 0, value_max = 0, value_rms = 0;
  bool operator==(const EncodingError&) const = default;
};

// Consecutive tokens that lie in one segment; the parts of a prefix follow one another.
struct StoredPart {
  TokenRange tokens;
  RowEncoding encoding = RowEncoding::kAsGiven;
  uint32_t chunk_tokens = 0;  // reclustered layout, from tokens.begin; 0: not reclustered
  bool operator==(const StoredPart&) const = default;
};

// Returns where a sequential read that begins at `begin` should end: `max_tokens` further, but in
// the reclustered layout at the end of a chunk, because part of a chunk costs the pages of all of
// it; never beyond `begin`'s part. Returns the prefix's end when `begin` lies behind it.
uint32_t RunEnd(std::span<const StoredPart> parts, uint32_t begin, uint32_t max_tokens);

}  // namespace prefixd
