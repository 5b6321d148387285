// Says why a prompt hit or missed: how far it matches, and what kept the rest from matching.
//
// Thread-safety: plain values and pure functions.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "prefixd/match.h"

namespace prefixd {

// What is explained: a match, and the identity that the engine has now, where it may differ from
// that of the registered model (empty: not compared).
struct ExplainSpec {
  MatchSpec match;
  std::vector<std::pair<std::string, std::string>> identity;
};

enum class MissReason : uint8_t {
  kDiverges = 0,       // the nearest stored prefix has another token there
  kEnds = 1,           // the nearest stored prefix ends there; the rest was not stored
  kNothingStored = 2,  // nothing that begins like the prompt is stored
  kNoModel = 3,        // no model of this name is registered
  kModelDiffers = 4,   // the tokens are stored under another model, or the identity is another
  kDerived = 5,        // more tokens match when derived rows are taken
  kExpired = 6,        // more tokens were stored; their time to live was over
  kQuarantined = 7,    // more tokens are stored, but damaged; or were evicted because of it
  kEvicted = 8,        // more tokens were stored; they made room in the store or on the disk
  kEvictedQuota = 9,   // more tokens were stored; they made room within the tenant's quota
  kRemoved = 10,       // more tokens were stored; they were removed
  kPutRefused = 11,    // a put of more tokens found no room
  kCompressed = 12,    // more tokens match when compressed prefixes are taken
};
inline constexpr size_t kMissReasons = 13;
std::string_view MissReasonName(MissReason reason);  // "diverges", "evicted", ...

struct FieldDifference {
  std::string field;  // a tag of the identity, or "geometry.n_layers", ...
  std::string asked, stored;
  bool operator==(const FieldDifference&) const = default;
};

struct Miss {
  MissReason reason = MissReason::kNothingStored;
  std::string text;       // one sentence for people
  uint32_t n_tokens = 0;  // so many tokens would match, at least, but for this
  // Where the reason has them: the prefix or segment concerned, the other model, when it happened.
  std::string prefix, model;
  int64_t unix_ms = 0;
  std::vector<FieldDifference> differs;
  std::optional<uint32_t> asked_token, stored_token;  // kDiverges
};

struct Explanation {
  PrefixMatch match;  // what Store::Match returns
  uint32_t asked_tokens = 0;
  std::vector<Miss> misses;  // why no more tokens match, the most tokens first; none: all do
};

}  // namespace prefixd
