// Checks and trivial answers that all indexes share. Internal to index/.
#pragma once

#include <functional>
#include <vector>

#include "index/search/key_index.h"
#include "prefixd/result.h"
#include "prefixd/selection.h"

namespace prefixd::index {

// Refuses what no index could answer: see KeyIndex::Search.
Status CheckRequest(const SearchRequest& request);

// All candidates, cuts exact at -inf, nothing scanned.
Selection SelectAll(const SearchRequest& request);

// Exact scores of a run of candidates: token i of it goes to scores[g * ld + i]. kInvalidArgument
// when one is not finite (the message names the token).
Status ScoreRange(const SearchRequest& request, TokenRange tokens, std::span<float> scores,
                  size_t ld);
// The same of keys at hand, those of the tokens from `first` on.
Status ScoreKeys(const SearchRequest& request, const RowsView& keys, uint32_t first,
                 std::span<float> scores, size_t ld);
// The same of single candidates, ascending.
Status ScoreTokens(const SearchRequest& request, std::span<const uint32_t> tokens,
                   std::span<float> scores, size_t ld);

// Calls body(keys, first) with the keys of consecutive runs of at most `most` tokens, read into
// scratch where they are not in memory.
Status ForEachRun(const SearchRequest& request, TokenRange tokens, uint32_t most,
                  const std::function<Status(const RowsView&, uint32_t)>& body);

// True if no score is NaN or infinite.
bool AllFinite(std::span<const float> scores);

}  // namespace prefixd::index
