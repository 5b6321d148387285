// Tells what a verification has read and found.
//
// Thread-safety: plain values.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace prefixd {

struct VerifySummary {
  uint64_t segments = 0, pages = 0, blobs = 0, bytes = 0;
  std::vector<std::string> damaged;
  std::vector<std::string> covered;  // ids of the segments that were read, each once
  // What could not be read: nothing is known of it, and nothing was quarantined or deleted.
  std::vector<std::string> unread;
};

}  // namespace prefixd
