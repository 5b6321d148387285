// Chooses which of the segment files that recovery found make up the new catalog, where several
// hold the same tokens or model.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "storage/files/store_options.h"
#include "storage/recover/recover_scan.h"
#include "storage/segment/prefix_info.h"
#include "storage/segment/records.h"

namespace prefixd::storage {

struct RecoverChoice {
  std::map<std::string, ModelRecord> models;
  std::map<SegmentId, SegmentRecord> segments;  // those left in SegmentScan::found
  std::vector<AliasRecord> aliases;
  std::vector<std::filesystem::path> superseded;  // another file has their rows
  uint64_t last_sequence = 0;
  uint32_t block_tokens = StoreOptions{}.block_tokens;
};

// Moves rejected files out of scan.found: into scan.damaged, or into the choice's `superseded`.
RecoverChoice ChooseSegments(SegmentScan& scan);

}  // namespace prefixd::storage
