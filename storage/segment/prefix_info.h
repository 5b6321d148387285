// Declares what a store records about a model and a stored prefix: names and plain values.
#pragma once

#include <array>
#include <compare>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "prefixd/kv_shape.h"
#include "prefixd/result.h"
#include "prefixd/stored_part.h"
#include "storage/segment/identity.h"

namespace prefixd::storage {

// A ModelRecord holds a model's name (unique in the store), fingerprint and geometry.
struct ModelRecord {
  std::string name;
  Fingerprint fingerprint;
  KvGeometry geometry;
  std::string description_json;  // the tagged fields behind the fingerprint, for people
};

struct SegmentId {
  std::array<uint8_t, 16> bytes{};
  std::string ToString() const;  // 32 hex digits
  static Result<SegmentId> Parse(std::string_view hex);
  auto operator<=>(const SegmentId&) const = default;
};

// A Lineage marks derived rows: computed behind an approximate step, or over rows that were. A
// chain has one lineage from its first derived segment on, a random number that its first derived
// put drew. All zero: exact rows.
using Lineage = std::array<uint8_t, 16>;
std::string LineageName(const Lineage& lineage);              // 32 hex digits; "" for exact rows
Result<Lineage> ParseLineage(std::string_view name_or_none);  // "": all zero

// An Acceptance says which rows a request takes beside exact ones, all of them stored, which it
// always takes.
struct Acceptance {
  bool approximate = false;  // derived rows, all of them
  Lineage lineage{};         // those of this lineage
  bool live = false;         // those of live segments too: for the session that moved them alone
  bool compressed = false;   // compressed segments, of which some rows alone are stored

  bool Takes(const Lineage& rows, bool of_live) const {
    return (live || !of_live) && (approximate || rows == Lineage{} || rows == lineage);
  }
  // segment: a SegmentRecord.
  template <typename Segment>
  bool TakesSegment(const Segment& segment) const {
    return Takes(segment.lineage, segment.live) && (compressed || !segment.compressed());
  }
};

// The segment in which a prefix ends names it; the prefix's tokens are those of the chain up to
// there. The name stays valid when segments are compacted: `chain` then ends in the compacted one.
struct PrefixInfo {
  SegmentId id;
  std::string model, tenant, label;
  uint32_t n_tokens = 0;           // tokens of the whole chain
  uint32_t own_tokens = 0;         // stored in this segment
  uint32_t exact_tokens = 0;       // the tokens before the chain's first derived segment
  Lineage lineage{};               // that of the derived ones
  std::vector<SegmentId> chain;    // root first, ending in `id`
  std::array<uint8_t, 16> file{};  // names the file that holds the last segment's rows now
  uint64_t own_bytes = 0;          // physical, on disk, blobs included
  uint32_t children = 0;
  int64_t created_unix_ms = 0, last_used_unix_ms = 0;
  bool quarantined = false;
  std::string quarantine;    // reason, for this segment or one it needs
  bool listed = true;        // false: kept only because others continue it
  bool reclustered = false;  // the last segment's rows lie by similarity of keys
  // The encoding of the last segment's rows, and its error. Other segments of the chain may differ.
  RowEncoding encoding = RowEncoding::kAsGiven;
  EncodingError encoding_error;
  bool live = false;  // own tokens that a session moved; they go with it
  // Of a compressed prefix: how many rows of its own tokens each KV head has, and the bytes of the
  // segment file with all rows. 0: not compressed.
  uint32_t kept_rows = 0;
  uint64_t full_bytes = 0;
  uint64_t file_bytes = 0;  // of the last segment's file now
  // The lifetime of this name: several names may stand for one segment, which stays as long as any
  // of them.
  bool pinned = false;          // never evicted
  int64_t expires_unix_ms = 0;  // 0: never
};

// What whoever needs all rows is told of a compressed prefix.
Error Compressed(const SegmentId& id);

}  // namespace prefixd::storage
