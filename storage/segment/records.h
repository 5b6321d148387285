// Defines the records of the catalog and of a segment's manifest, and their encoding: versioned
// msgpack, so that fields can be added. Malformed bytes give kCorrupt.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "prefixd/partition.h"
#include "prefixd/result.h"
#include "storage/segment/prefix_info.h"
#include "storage/segment/segment_format.h"

namespace prefixd::storage {

// A SegmentRecord describes one committed segment. The parent is all zero when the segment starts
// at token 0.
struct SegmentRecord {
  SegmentId id;
  Uuid file{};            // names the file that holds its rows now: <file>.seg
  uint64_t sequence = 0;  // number of that file's commit
  std::string model, tenant, label;
  SegmentId parent;
  TokenRange tokens;         // positions in the prefix
  uint32_t first_token = 0;  // first own token id; tells siblings apart
  uint64_t file_bytes = 0;
  int64_t created_unix_ms = 0;
  bool reclustered = false;  // rows are in the reclustered layout
  // A put prompt ends here. False: the segment is kept only because others continue it.
  bool listed = true;
  // The lifetime of the segment's own name; cleared when the name goes.
  bool pinned = false;          // never evicted
  int64_t expires_unix_ms = 0;  // 0: never
  // The first ids of a segment that starts at token 0, up to a block and kMaxLeadTokens, so that a
  // match need not open every file to find that prompts differ early. May be empty.
  std::vector<uint32_t> lead;
  RowEncoding encoding = RowEncoding::kAsGiven;  // encoding of its rows
  EncodingError encoding_error;
  Lineage lineage{};  // all zero: exact rows
  // Own tokens that a session moved out of memory. They serve that session alone, and what a
  // process leaves of them is removed when the store is opened again.
  bool live = false;
  // Of a compressed segment: rows of each run, and the bytes of its file with all rows. 0: it is
  // not compressed.
  uint32_t kept_rows = 0;
  uint64_t full_bytes = 0;

  bool compressed() const { return kept_rows > 0; }
  bool is_root() const { return parent == SegmentId{}; }
  bool operator==(const SegmentRecord&) const = default;
};

inline bool Expired(int64_t expires_unix_ms, int64_t now_unix_ms) {
  return expires_unix_ms != 0 && expires_unix_ms <= now_unix_ms;
}

// An AliasRecord names a prefix whose segment was compacted into the one that continued it.
struct AliasRecord {
  SegmentId id;
  SegmentId segment;  // the segment that holds its tokens now, and more behind them
  uint32_t n_tokens = 0;
  std::string label;
  int64_t created_unix_ms = 0;
  bool pinned = false;
  int64_t expires_unix_ms = 0;  // 0: never

  bool operator==(const AliasRecord&) const = default;
};
inline constexpr uint32_t kMaxLeadTokens = 256;
// Returns the lead of a segment that starts with `tokens`.
inline std::vector<uint32_t> LeadOf(std::span<const uint32_t> tokens, uint32_t block_tokens) {
  const auto lead = tokens.first(std::min<size_t>({tokens.size(), block_tokens, kMaxLeadTokens}));
  return {lead.begin(), lead.end()};
}

std::string EncodeModel(const ModelRecord& model);
Result<ModelRecord> DecodeModel(std::string_view bytes);
std::string EncodeSegment(const SegmentRecord& record);
Result<SegmentRecord> DecodeSegment(std::string_view bytes);
std::string EncodeAlias(const AliasRecord& alias);
Result<AliasRecord> DecodeAlias(std::string_view bytes);

// A SegmentManifest lies inside a segment file and holds all that a rebuilt catalog needs beyond
// header and footer.
struct SegmentManifest {
  ModelRecord model;
  std::string tenant, label;
  uint32_t block_tokens = 0;
  bool listed = true;                // when the file was written
  std::vector<AliasRecord> aliases;  // names of prefixes that end inside the segment
  std::vector<SegmentId>
      replaces;       // after a compaction: the segments whose tokens this one took over
  bool live = false;  // as in SegmentRecord
};
std::string EncodeManifest(const SegmentManifest& manifest);
Result<SegmentManifest> DecodeManifest(std::string_view bytes);

}  // namespace prefixd::storage
