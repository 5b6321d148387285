// Several requests served by one pass over keys or codes. Internal to index/.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "index/search/key_index.h"
#include "index/search/search_request.h"
#include "prefixd/result.h"
#include "prefixd/selection.h"

namespace prefixd::index {

// Scores that one pass keeps, at most; one request may need more, and then has a pass of its own.
inline constexpr size_t kPassBytes = size_t{32} << 20;

// Those of `wanted` (positions in `requests`) that one pass can serve, together: over the same keys
// and candidates, with scores of `score_bytes` that fit into kPassBytes. In order of appearance.
std::vector<std::vector<size_t>> Passes(std::span<const SearchRequest> requests,
                                        std::span<const size_t> wanted, size_t score_bytes);

// What request `i` of a pass by `n` pays for `bytes` read once: together exactly `bytes`.
inline uint64_t ShareOf(uint64_t bytes, size_t n, size_t i) { return (bytes + n - 1 - i) / n; }

// Scores every candidate from the keys: exact cuts. Each run of keys is read once for a pass.
std::vector<Result<Selection>> SearchAllExactly(std::span<const SearchRequest> requests);
// The same of those at `wanted`, which have passed CheckRequest, into `selections`.
void SearchExactly(std::span<const SearchRequest> requests, std::span<const size_t> wanted,
                   std::span<Result<Selection>> selections);
Result<Selection> SearchExactly(const SearchRequest& request);

}  // namespace prefixd::index
