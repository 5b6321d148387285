// Every candidate's score as a search by codes knows it: exact where it scored the key itself, else
// by its code. For the estimate by scan. Internal to index/.
//
// A code leaves something of its key out: s = s_code + e. Even where e is zero on average,
// E[exp(s)] = exp(s_code) E[exp(e)] is larger than exp(s_code), by 0.05 to 0.5 in the logarithm on
// heads of real models, and keys of unlike spread miss unlike much. So e is measured: a few keys
// are drawn as their codes give them mass, and scored exactly; their weighted mean of exp(e) is an
// estimate of what the mass of all is short of (self-normalised importance sampling), consistent
// whatever the distribution of e: the more draws, the nearer. It is not without bias, for draws lie
// at fixed places of the cumulated mass, weights are divided by their own sum, and the logarithm of
// a mean is low on average: of the order of 1 / kDrawnKeys, -0.019 to +0.005 in the logarithm as
// measured (docs/selection.md).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "index/code_search/code_ranks.h"
#include "index/search/key_index.h"
#include "prefixd/result.h"

namespace prefixd::index {

// So many keys are drawn for each head of a group; all heads learn from all of them.
inline constexpr size_t kDrawnKeys = 64;

// Into request.scores [G][candidates] the scores by codes, each head's raised by what codes were
// found to miss; -inf for the tokens `exact`, which will be scored exactly. Returns how many keys
// it read. What is drawn depends on the request and the codes alone.
//   parts: of a scan of all blocks
Result<size_t> ScoresByCodes(const SearchRequest& request, std::span<const CodeScores> parts,
                             std::span<const uint32_t> exact);

// The exact ones of `tokens`: scores [G][tokens.size()].
void PutExactScores(const SearchRequest& request, std::span<const uint32_t> tokens,
                    std::span<const float> scores);

}  // namespace prefixd::index
