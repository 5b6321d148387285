// What recovery finds in the segments directory: which files verify, and what they say.
//
// Thread-safety: used by one thread.
#pragma once

#include <filesystem>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "prefixd/result.h"
#include "storage/io/io_engine.h"
#include "storage/io/progress.h"
#include "storage/segment/records.h"

namespace prefixd::storage {

struct FoundSegment {
  std::filesystem::path path;
  SegmentRecord record;
  SegmentManifest manifest;
  std::string damage;  // of its rows; empty: none seen
};

struct SegmentScan {
  std::vector<FoundSegment> found;
  std::vector<std::filesystem::path> unfinished;                       // puts never sealed
  std::vector<std::pair<std::filesystem::path, std::string>> damaged;  // and why
  std::map<Uuid, std::vector<std::filesystem::path>> stores;           // whose the found ones are
};

// Recovery verifies what is on the disk, where the file system allows it.
inline constexpr bool kRecoverDirect = true;

// Inspects every segment file of the store in `dir`; with `verify_data` every page of its rows.
// Changes nothing. kFailedPrecondition: a newer prefixd wrote one of them. kCancelled: `progress`
// said to stop.
Result<SegmentScan> ScanSegments(IoEngine& engine, const std::filesystem::path& dir,
                                 bool verify_data, const Progress& progress);

}  // namespace prefixd::storage
