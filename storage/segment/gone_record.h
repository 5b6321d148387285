// Describes what is not stored any more, and why: a removed segment, a put that was refused, a
// model that was removed. The catalog keeps a bounded number of them (catalog/gone_history.h), so
// that a miss can be explained.
//
// Thread-safety: plain values.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "prefixd/partition.h"
#include "prefixd/result.h"
#include "storage/segment/identity.h"
#include "storage/segment/prefix_info.h"

namespace prefixd::storage {

// The numbers are stored and never change.
enum class GoneReason : uint8_t {
  kRemoved = 1,       // by a call, or because no name needed it any more
  kExpired = 2,       // its time to live was over
  kEvicted = 3,       // to keep the store's limit, or free space on the disk
  kEvictedQuota = 4,  // to keep the tenant's quota
  kDamaged = 5,       // evicted first, because it was quarantined
  kRefused = 6,       // a put that found no room: nothing was stored
  kModelRemoved = 7,
};

struct GoneRecord {
  GoneReason reason = GoneReason::kRemoved;
  std::string tenant;
  SegmentId id;       // all zero: none
  TokenRange tokens;  // positions in the prefix
  int64_t unix_ms = 0;
  std::string why;                // a sentence for people; may be empty
  std::vector<BlockHash> blocks;  // some of its blocks (SampleBlocks), in order

  bool operator==(const GoneRecord&) const = default;
};

// A record names at most so many blocks: its last one, and others evenly spread.
inline constexpr size_t kGoneBlocks = 32;
std::vector<BlockHash> SampleBlocks(std::span<const BlockHash> hashes);

// Stands for a model's name among the blocks.
BlockHash ModelNameHash(std::string_view name);

std::string EncodeGone(const GoneRecord& record);
Result<GoneRecord> DecodeGone(std::string_view bytes);

}  // namespace prefixd::storage
