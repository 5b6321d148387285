#include "runtime/derived/segment_parts.h"

#include <algorithm>

namespace prefixd {

Result<std::vector<SegmentPart>> ChainParts(const storage::SegmentSource& segments,
                                            const storage::PrefixInfo& prefix, uint32_t n_tokens) {
  std::vector<SegmentPart> parts;
  for (const storage::SegmentId& id : prefix.chain) {
    PREFIXD_ASSIGN(const auto info, segments.GetPrefix(id));
    const TokenRange stored{info.n_tokens - info.own_tokens, info.n_tokens};
    // A segment may begin before its parent's end: the parent is unused from there on.
    while (!parts.empty() && parts.back().used.end > stored.begin) {
      parts.back().used.end = std::max(parts.back().used.begin, stored.begin);
      if (parts.back().used.size() > 0) break;
      parts.pop_back();
    }
    if (stored.begin >= n_tokens) break;
    parts.push_back({id, stored, {stored.begin, std::min(stored.end, n_tokens)}});
  }
  return parts;
}

}  // namespace prefixd
