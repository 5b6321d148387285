// Searching compact codes of several segments as one, for one request or many. Internal to index/.
#pragma once

#include <span>
#include <vector>

#include "index/code_search/part_scan.h"
#include "index/search/key_index.h"
#include "prefixd/result.h"

namespace prefixd::index {

// What KeyIndex::SearchMany promises, over the codes of `all`: ascending, disjoint.
// effort: at least 1; what codes are taken to miss is so many times what they do.
std::vector<Result<Selection>> SearchCodes(std::span<const SearchRequest> requests,
                                           std::span<const CodePart> all, float effort);

}  // namespace prefixd::index
