// Repairs the end of RocksDB's MANIFEST after a power cut. RocksDB appends a record and syncs it
// before it deletes what the record replaces; a crash in between may leave the record torn, and
// then RocksDB refuses to open, although every acknowledged write is inside. Internal to the
// catalog.
//
// The format (RocksDB wiki, "Write Ahead Log File Format"): blocks of 32 KiB; records of CRC-32C
// (masked, over type and payload), length and type, seven bytes in all, then the payload; none
// straddles a block.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <vector>

#include "prefixd/result.h"

namespace prefixd::storage {

// Returns where the first record that does not verify begins; nullopt: all records verify, or sound
// records follow it, so that it is no torn end.
std::optional<size_t> TornManifestTail(std::span<const std::byte> manifest);

// A CutManifest holds the file that CURRENT names in `dir`, and its bytes before the cut.
struct CutManifest {
  std::filesystem::path file;
  std::vector<std::byte> before;
};
// Cuts a torn end off, durably. nullopt: there is none. The cut keeps all synced data: what the
// torn record replaced is still there, or RocksDB misses it and refuses to open as before (then
// call Restore).
Result<std::optional<CutManifest>> CutTornManifest(const std::filesystem::path& dir);
Status Restore(const CutManifest& cut);

}  // namespace prefixd::storage
