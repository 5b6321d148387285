// Says which stored prefix a session attaches to, and how.
//
// Thread-safety: plain values.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "prefixd/estimate.h"
#include "prefixd/policy.h"

namespace prefixd {

struct AttachSpec {
  std::string model;
  std::string tenant;
  std::vector<uint32_t> tokens;  // attaches to their longest stored prefix ...
  std::string prefix;            // ... or to this one, when tokens are empty
  uint32_t n_tokens = 0;         // cuts the prefix here; 0: as long as it matches
  StepPolicy policy;
  bool accept_approximate = false;  // as in MatchSpec; a prefix that is named is refused otherwise
  std::string lineage;
  // Bounds the attach and each call of the session: kDeadlineExceeded beyond it, and the session
  // goes on. 0: none. Over a connection its own bound holds, too (ConnectOptions).
  uint32_t call_timeout_ms = 0;
  EngineSpeed engine;
  // Own tokens that the session keeps in memory (prefixd/session.h). Beyond so many the oldest move
  // to the store in the background, until half as many are left. 0: all stay in memory; otherwise
  // at least kMinOwnMemoryTokens.
  uint32_t own_memory_tokens = 0;
  bool accept_compressed = false;  // as in MatchSpec; a prefix that is named needs it not
};

inline constexpr uint32_t kMinOwnMemoryTokens = 256;

}  // namespace prefixd
