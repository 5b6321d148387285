// Scans the segments directory for recovery: which files verify, and what they say.
//
// Thread-safety: used by one thread.
#pragma once

#include <filesystem>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "prefixd/result.h"
#include "storage/crypt/key_ring.h"
#include "storage/io/io_engine.h"
#include "storage/io/progress.h"
#include "storage/segment/records.h"

namespace prefixd::storage {

struct FoundSegment {
  std::filesystem::path path;
  Uuid store{};  // that its header names
  SegmentRecord record;
  SegmentManifest manifest;
  std::string damage;  // damage to its rows; empty: none seen
};

struct SegmentScan {
  std::vector<FoundSegment> found;
  std::vector<std::filesystem::path> unfinished;                       // puts never sealed
  std::vector<std::pair<std::filesystem::path, std::string>> damaged;  // path, reason
  // Store uuid -> the found files that name it.
  std::map<Uuid, std::vector<std::filesystem::path>> stores;
};

// Inspects every segment file of the store in `dir`; with `verify_data` also every page of its
// rows, past the page cache where the file system allows it. Without it, too, what is read comes
// from the disk: nothing of a file that was in the page cache is used. Changes nothing.
// kFailedPrecondition: a newer prefixd wrote one of them, or `keys` (null: none) lack the key of
// one. kCancelled: `progress` returned false. Only what does not verify is damaged: when a file
// cannot be read, not the second time either, CannotRead of its error is returned.
Result<SegmentScan> ScanSegments(IoEngine& engine, const std::filesystem::path& dir,
                                 bool verify_data, const KeyRing* keys, const Progress& progress);
// Returns an error that names the file and says what to do.
Error CannotRead(const std::filesystem::path& file, const Error& error);

}  // namespace prefixd::storage
