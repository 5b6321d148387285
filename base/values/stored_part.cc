#include "prefixd/stored_part.h"

#include <algorithm>
#include <string>

namespace prefixd {

std::string_view RowEncodingName(RowEncoding encoding) {
  return encoding == RowEncoding::kInt8 ? "int8" : "as_given";
}

Result<RowEncoding> RowEncodingFromName(std::string_view name) {
  for (const RowEncoding encoding : {RowEncoding::kAsGiven, RowEncoding::kInt8}) {
    if (RowEncodingName(encoding) == name) return encoding;
  }
  return InvalidArgument("rows are stored as_given or int8, not '" + std::string(name) + "'");
}

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

}  // namespace prefixd
