// What a segment file says of itself, when the catalog does not know it or is not to be trusted.
//
// Thread-safety: pure functions over files. Errors: kCorrupt when a file was never sealed or does
// not verify, kFailedPrecondition when a newer prefixd wrote it, kIo when it cannot be read.
#pragma once

#include <filesystem>
#include <memory>
#include <span>
#include <vector>

#include "storage/segment/records.h"
#include "storage/segment/segment_file.h"

namespace prefixd::storage {

// Header and footer: enough to know whose file it is and how old.
struct SegmentEnds {
  SegmentHeader header;
  SegmentFooter footer;
  uint64_t file_bytes = 0;
};
Result<SegmentEnds> ReadSegmentEnds(IoEngine& engine, const std::filesystem::path& path,
                                    bool direct);
// Whether the file is as a put leaves it that was cut short: a sound header, no last page yet.
bool IsUnfinished(IoEngine& engine, const std::filesystem::path& path, bool direct);

// Verified: both ends, checksum table, token ids and manifest; not the rows.
struct InspectedSegment {
  std::shared_ptr<const SegmentFile> file;  // its record() is all that a catalog can know from it
  SegmentManifest manifest;
};
Result<InspectedSegment> InspectSegment(IoEngine& engine, const std::filesystem::path& path,
                                        bool direct);

// Token ids of the prefix that ends with the last of `chain` (root first).
Result<std::vector<uint32_t>> ChainTokens(IoEngine& engine, const std::filesystem::path& dir,
                                          std::span<const SegmentRecord> chain, bool direct);
// Of `hashes`, those of the blocks that end in a segment beginning at token `begin`.
std::vector<BlockHash> OwnHashes(std::span<const BlockHash> hashes, uint32_t begin,
                                 uint32_t block_tokens);
// kCorrupt, saying why, when `child` cannot continue `parent`.
Status CheckContinues(const SegmentRecord& parent, const SegmentRecord& child);

}  // namespace prefixd::storage
