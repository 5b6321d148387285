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

// The rows of `tokens`, which lie inside what request.keys covers.
RowsView KeysOf(const SearchRequest& request, TokenRange tokens);

// True if no score is NaN or infinite.
bool AllFinite(std::span<const float> scores);
// For scores that are not finite: names the first of `keys` that is not, row i being token
// first_token + i, or says that finite inputs overflowed.
Error ExplainNonFiniteKeys(const RowsView& keys, uint32_t first_token);

// Scores every candidate from the keys: exact cuts. The request has passed CheckRequest.
Result<Selection> SearchExactly(const SearchRequest& request);

}  // namespace prefixd::index
