// From tokens that an index proposes to the set that is returned. Internal to index/.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "index/search/key_index.h"
#include "prefixd/result.h"
#include "prefixd/selection.h"

namespace prefixd::index {

// What an index that proposes tokens does first: refuses a request that is wrong or of other
// dimensions than the index, and empties the request's outputs, which it does not fill.
Status BeginSearch(const SearchRequest& request, uint32_t key_dim);

// The candidates that `covered` leaves out: before it, and behind it.
struct Outside {
  TokenRange before, after;
  size_t size() const { return size_t{before.size()} + after.size(); }
};
Outside OutsideOf(TokenRange candidates, TokenRange covered);

// The k best of `proposed` (ascending, among the candidates) and of all tokens outside, by their
// exact keys; approximate cuts. At least k in all. keys_scanned and bytes_scanned are of the keys
// read here.
Result<Selection> SelectAmong(const SearchRequest& request, std::span<const uint32_t> proposed,
                              const Outside& outside);

}  // namespace prefixd::index
