#include "storage/segment/stored_part.h"

#include <algorithm>

#include "storage/segment/row_encoding.h"

namespace prefixd::storage {
namespace {

uint64_t RowBytes(const StoredPart& part, const RowShape& row) {
  const auto [key, value] = StoredRowBytes(row, part.encoding);
  return uint64_t{key} + value;
}

}  // namespace

uint64_t RowsBytes(std::span<const StoredPart> parts, const RowShape& row, TokenRange tokens) {
  uint64_t bytes = 0;
  for (const StoredPart& part : parts) {
    const uint32_t begin = std::max(tokens.begin, part.tokens.begin);
    const uint32_t end = std::min(tokens.end, part.tokens.end);
    if (begin < end) bytes += (end - begin) * RowBytes(part, row);
  }
  return bytes;
}

uint64_t RowsBytes(std::span<const StoredPart> parts, const RowShape& row,
                   std::span<const uint32_t> ids) {
  uint64_t bytes = 0;
  auto at = ids.begin();
  for (const StoredPart& part : parts) {
    const auto end = std::lower_bound(at, ids.end(), part.tokens.end);
    bytes += static_cast<uint64_t>(end - at) * RowBytes(part, row);
    at = end;
  }
  return bytes;
}

double MeanRowBytes(std::span<const StoredPart> parts, const RowShape& row) {
  uint64_t bytes = 0, tokens = 0;
  for (const StoredPart& part : parts) {
    bytes += part.tokens.size() * uint64_t{RowBytes(part, row)};
    tokens += part.tokens.size();
  }
  return tokens == 0 ? double(row.bytes()) : double(bytes) / double(tokens);
}

}  // namespace prefixd::storage
