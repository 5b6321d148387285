// Scores tokens of one KV head by what queries attend to, as retention policies do
// (docs/policy.md): which tokens keep their rows when a prefix is compressed, and which stay in
// memory when a session's own tokens move.
//
// Thread-safety: plain values and pure functions.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "prefixd/partition.h"
#include "prefixd/result.h"

namespace prefixd {

enum class RetentionPolicy : uint8_t {
  kWindow,      // the newest ([StreamingLLM])
  kTova,        // the last query alone ([TOVA])
  kH2o,         // all attention, added up ([H2O])
  kLocal,       // the mean over the last queries
  kSnapKv,      // that, pooled ([SnapKV])
  kGlobal,      // its share of the largest, the largest decayed one so far ([G-KV])
  kGlobalSum,   // such shares, decayed and added up
  kGlobalMean,  // their moving average
  kGkv,         // kGlobal, less what doubles other keys (redundancy.h)
  kKvPop,       // trained scorers (token_scorer.h)
};
// kInvalidArgument names all that there are.
Result<RetentionPolicy> RetentionPolicyFromName(std::string_view name);
inline bool NeedsQueries(RetentionPolicy policy) {
  return policy != RetentionPolicy::kWindow && policy != RetentionPolicy::kKvPop;
}
// Whether a token's score depends on earlier ones of its own.
inline bool Remembers(RetentionPolicy policy) {
  return NeedsQueries(policy) && policy != RetentionPolicy::kTova &&
         policy != RetentionPolicy::kLocal && policy != RetentionPolicy::kSnapKv;
}

inline constexpr uint32_t kObservedQueries = 16;  // of one window
inline constexpr uint32_t kSnapKvPooling = 5;     // neighbours, the token itself in their middle
inline constexpr double kGlobalDecay = 0.8;       // of the global score from window to window

// What one query attends to: of the group's query heads the largest share of softmax attention, or
// their mean, over the tokens that it saw.
struct ObservedQuery {
  uint32_t position = 0;          // it saw the tokens up to here
  std::vector<double> attention;  // [region]; of unseen tokens without meaning
};
enum class GroupShare : uint8_t { kLargest, kMean };
// TOVA and H2O take the mean, the others the largest.
GroupShare ShareOf(RetentionPolicy policy);

// Adds one query's attention to the tokens of `region`. scores: [G][tokens], of tokens [0, tokens),
// natural and scaled; those behind `position` are not seen.
ObservedQuery Observe(std::span<const float> scores, uint32_t group, uint32_t position,
                      TokenRange region, GroupShare share = GroupShare::kLargest);

// Returns what tokens of `region` count for, by any policy but kKvPop; `queries` by ascending
// position. That of kGkv is the global score, of which redundancy.h makes its own. A token that no
// query saw counts more than any other: nothing is known against it, and it is newer than the
// others.
//   past: [region] what they counted for before, of policies that remember; NaN or nothing at all:
//   never yet
std::vector<double> RetentionScores(RetentionPolicy policy, TokenRange region,
                                    std::span<const ObservedQuery> queries,
                                    std::span<const double> past = {});

// Returns the `n` tokens of highest score, ascending; of equals the newer ones.
std::vector<uint32_t> HighestScored(std::span<const double> scores, TokenRange region, uint32_t n);

}  // namespace prefixd
