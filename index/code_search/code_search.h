// Searching compact codes of several segments as one, for one request or many. Internal to index/.
#pragma once

#include <span>
#include <vector>

#include "index/code_search/block_choice.h"
#include "index/search/key_index.h"
#include "prefixd/result.h"

namespace prefixd::index {

// What KeyIndex::SearchMany promises, over the codes of `all`: ascending, disjoint.
// effort: the part of the blocks that is scanned; above 1 all of them, and so much wider margins.
std::vector<Result<Selection>> SearchCodes(std::span<const SearchRequest> requests,
                                           std::span<const CodePart> all, float effort);

}  // namespace prefixd::index
