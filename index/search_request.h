// Checks and trivial answers that all indexes share. Internal to index/.
#pragma once

#include "attention/result.h"
#include "attention/selection.h"
#include "index/key_index.h"

namespace prefixd::index {

// Refuses what no index could answer: see KeyIndex::Search.
Status CheckRequest(const SearchRequest& request);

// All candidates, cuts exact at -inf, nothing scanned.
Selection SelectAll(const SearchRequest& request);

// Exact scores of a run of candidates: token i of it goes to scores[g * ld + i]. kInvalidArgument
// when one is not finite (the message names the token).
Status ScoreRange(const SearchRequest& request, TokenRange tokens, std::span<float> scores,
                  size_t ld);
// The same of single candidates, ascending.
Status ScoreTokens(const SearchRequest& request, std::span<const uint32_t> tokens,
                   std::span<float> scores, size_t ld);

// True if no score is NaN or infinite.
bool AllFinite(std::span<const float> scores);
// Scores every candidate from the keys: exact cuts. The request has passed CheckRequest.
Result<Selection> SearchExactly(const SearchRequest& request);

}  // namespace prefixd::index
