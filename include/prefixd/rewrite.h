// Says how a stored prefix is rewritten on request, and what became of it.
//
// Thread-safety: plain values and pure functions.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "prefixd/result.h"

namespace prefixd {

enum class RewriteKind : uint8_t {
  kRecluster = 0,  // rows that lie near in key space share pages
  kCompact = 1,    // a segment and the one that it continues become one file
  kEncrypt = 2,    // what is in clear, or under an older key, is encrypted under the newest
};
std::string_view RewriteKindName(RewriteKind kind);  // "recluster", "compact", "encrypt"
Result<RewriteKind> RewriteKindFromName(std::string_view name);

struct RewriteResult {
  uint32_t segments = 0;          // that the prefix needs now
  uint32_t rewritten = 0;         // of them, by this call
  uint64_t bytes = 0;             // written by it
  std::vector<std::string> left;  // one sentence for each that could not be rewritten, and why
};

}  // namespace prefixd
