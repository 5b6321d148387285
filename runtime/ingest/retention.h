// Ranks the tokens of a stored segment by retention policies (docs/policy.md), for one KV head:
// which of them keep their rows when the prefix is compressed.
//
// Thread-safety: plain values and pure functions.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "prefixd/partition.h"
#include "prefixd/result.h"

namespace prefixd {

enum class RetentionPolicy : uint8_t { kWindow, kLocal, kSnapKv, kGlobal, kGkv, kKvPop };
Result<RetentionPolicy> RetentionPolicyFromName(std::string_view name);
inline bool NeedsQueries(RetentionPolicy policy) {
  return policy != RetentionPolicy::kWindow && policy != RetentionPolicy::kKvPop;
}

inline constexpr uint32_t kObservedQueries = 16;  // of one window
inline constexpr uint32_t kSnapKvPooling = 5;     // neighbours, the token itself in their middle
inline constexpr double kGlobalDecay = 0.8;       // of the global score from window to window

// What one query attends to: of the group's query heads the largest share of softmax attention,
// over the tokens that it saw.
struct ObservedQuery {
  uint32_t position = 0;          // it saw the tokens up to here
  std::vector<double> attention;  // [region]; of unseen tokens without meaning
};

// Adds one query's attention to the tokens of `region`. scores: [G][tokens], of tokens [0, tokens),
// natural and scaled; those behind `position` are not seen.
ObservedQuery Observe(std::span<const float> scores, uint32_t group, uint32_t position,
                      TokenRange region);

// Returns what tokens of `region` count for, by any policy but kKvPop (token_scorer.h); `queries`
// by ascending position. That of kGkv is the global score, of which redundancy.h makes its own. A
// token that no query saw counts more than any other: nothing is known against it, and it is newer
// than the others.
std::vector<double> RetentionScores(RetentionPolicy policy, TokenRange region,
                                    std::span<const ObservedQuery> queries);

// Returns the `n` tokens of highest score, ascending; of equals the newer ones.
std::vector<uint32_t> HighestScored(std::span<const double> scores, TokenRange region, uint32_t n);

}  // namespace prefixd
