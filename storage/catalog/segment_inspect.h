// Reads what a segment file says of itself, for when the catalog does not know it or is not
// trusted.
//
// Thread-safety: pure functions over files. Errors: kCorrupt when a file was never sealed or does
// not verify, kFailedPrecondition when a newer prefixd wrote it or the key of an encrypted one is
// not in `keys` (null: there are none), kIo when it cannot be read.
#pragma once

#include <filesystem>
#include <memory>
#include <span>
#include <vector>

#include "storage/segment/records.h"
#include "storage/segment/segment_file.h"

namespace prefixd::storage {

// SegmentEnds holds header and footer: enough to know the file's owner and age.
struct SegmentEnds {
  SegmentHeader header;
  SegmentFooter footer;
  uint64_t file_bytes = 0;
};
Result<SegmentEnds> ReadSegmentEnds(IoEngine& engine, const std::filesystem::path& path,
                                    bool direct, const KeyRing* keys = nullptr);
// Returns whether the file is as an interrupted put leaves it: a sound header, no last page yet.
bool IsUnfinished(IoEngine& engine, const std::filesystem::path& path, bool direct);

// An InspectedSegment is verified except for its rows: both ends, checksum table, token ids and
// manifest.
struct InspectedSegment {
  std::shared_ptr<const SegmentFile> file;  // its record() is all that a catalog can know from it
  SegmentManifest manifest;
};
Result<InspectedSegment> InspectSegment(IoEngine& engine, const std::filesystem::path& path,
                                        bool direct, const KeyRing* keys = nullptr);

// Returns the token ids of the prefix that ends with the last segment of `chain` (root first).
Result<std::vector<uint32_t>> ChainTokens(IoEngine& engine, const std::filesystem::path& dir,
                                          std::span<const SegmentRecord> chain, bool direct,
                                          const KeyRing* keys);
// Returns the part of `hashes` whose blocks end in a segment that begins at token `begin`.
std::vector<BlockHash> OwnHashes(std::span<const BlockHash> hashes, uint32_t begin,
                                 uint32_t block_tokens);
// Returns kCorrupt, with the reason, when `child` cannot continue `parent`.
Status CheckContinues(const SegmentRecord& parent, const SegmentRecord& child);

}  // namespace prefixd::storage
