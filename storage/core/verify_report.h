// What a verification found, and how it tells of its progress. Plain values.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "storage/segment/prefix_info.h"

namespace prefixd::storage {

// Tells what a verification has read and found.
struct VerifyReport {
  uint64_t pages = 0, blobs = 0, bytes = 0;
  std::vector<std::string> damaged;  // one sentence each: what and where
  std::vector<SegmentId> covered;    // the segments that were read, each once
  std::vector<std::string>
      unread;  // like damaged: what could not be read, so that nothing is known
};

// Hears of a damaged blob that was deleted, on the thread that met it; the caller may hold locks of
// its own.
using BlobLost = std::function<void(const SegmentId&, std::string_view name)>;

}  // namespace prefixd::storage
