// Lists the segments in a prefix's chain, and how much of each the prefix uses.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "prefixd/partition.h"
#include "prefixd/result.h"
#include "runtime/derived/models.h"
#include "storage/store/segment_source.h"

namespace prefixd {

// Rows are read and added in runs of this many tokens.
inline constexpr uint32_t kRunTokens = 2048;

inline size_t HeadCount(const Model& model) { return model.heads.count(); }

// One segment of a prefix's chain, and how much of it the prefix uses.
struct SegmentPart {
  storage::SegmentId id;
  TokenRange stored;  // positions of the segment's own tokens
  TokenRange used;    // [stored.begin, e): never empty
};
// Returns the chain of `prefix`, cut at n_tokens (at most the prefix's length).
Result<std::vector<SegmentPart>> ChainParts(const storage::SegmentSource& segments,
                                            const storage::PrefixInfo& prefix, uint32_t n_tokens);

}  // namespace prefixd
