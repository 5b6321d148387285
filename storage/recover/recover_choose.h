// Which of the segment files that recovery found the new catalog is made of, where several speak of
// the same thing.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "storage/segment/prefix_info.h"
#include "storage/store/store_options.h"
#include "storage/segment/records.h"
#include "storage/recover/recover_scan.h"

namespace prefixd::storage {

struct RecoverChoice {
  std::map<std::string, ModelRecord> models;
  std::map<SegmentId, SegmentRecord> segments;  // of what is left in SegmentScan::found
  std::vector<AliasRecord> aliases;
  std::vector<std::filesystem::path> superseded;  // another file has their rows
  uint64_t last_sequence = 0;
  uint32_t block_tokens = StoreOptions{}.block_tokens;
};

// Takes what is not believed out of scan.found: into scan.damaged, or the choice's `superseded`.
RecoverChoice ChooseSegments(SegmentScan& scan);

}  // namespace prefixd::storage
