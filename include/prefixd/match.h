// Says what a match searches for and what it found.
//
// Thread-safety: plain values.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "prefixd/estimate.h"

namespace prefixd {

// A match takes exact rows, and derived ones where it says so: all, or those of the session that
// the engine continues, by the lineage that its first derived put returned.
struct MatchSpec {
  std::string model, tenant;
  std::vector<uint32_t> tokens;
  bool accept_approximate = false;
  std::string lineage;
  EngineSpeed engine;
  // Takes compressed prefixes (compress.h), too: they serve steps under a policy, and can neither
  // be restored nor continued. Of equally long ones an uncompressed one is taken.
  bool accept_compressed = false;
  bool operator==(const MatchSpec&) const = default;
};

struct PrefixMatch {
  std::string prefix;  // id (32 hex digits); empty when nothing matches
  uint32_t n_tokens = 0;
  uint32_t stored_tokens = 0;
  uint32_t exact_tokens = 0;  // the matched tokens before the first derived one
  ReuseEstimate estimate;     // of nothing when nothing matches
  bool compressed = false;    // of some of its tokens no rows are stored
};

}  // namespace prefixd
