#include "storage/stored_part.h"

#include <algorithm>

namespace prefixd::storage {
namespace {

uint64_t RowBytes(const StoredPart& part, const RowShape& row) {
  const auto [key, value] = StoredRowBytes(row, part.encoding);
  return uint64_t{key} + value;
}

}  // namespace

uint32_t RunEnd(std::span<const StoredPart> parts, uint32_t begin, uint32_t max_tokens) {
  for (const StoredPart& part : parts) {
    if (begin >= part.tokens.end) continue;
    const uint64_t own = begin - part.tokens.begin;
    const uint64_t end = part.chunk_tokens > 0 ? (own / part.chunk_tokens + 1) * part.chunk_tokens
                                               : own + std::max<uint64_t>(max_tokens, 1);
    return static_cast<uint32_t>(std::min<uint64_t>(part.tokens.begin + end, part.tokens.end));
  }
  return parts.empty() ? 0 : parts.back().tokens.end;
}

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
