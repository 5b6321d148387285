// Searching compact codes of several segments as one, for one request or many. Internal to index/.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "attention/key_codes.h"
#include "attention/partition.h"
#include "attention/result.h"
#include "index/key_index.h"

namespace prefixd::index {

// Codes of tokens `used`, which lie inside what `codes` covers.
struct CodePart {
  const CodeBook* book = nullptr;
  std::span<const std::byte> codes;
  uint32_t first_token = 0;  // of the first block
  TokenRange used;
};

// What KeyIndex::SearchMany promises, over the codes of `all`: ascending, disjoint.
// effort: of the short list, in multiples of k.
std::vector<Result<Selection>> SearchCodes(std::span<const SearchRequest> requests,
                                           std::span<const CodePart> all, float effort);

}  // namespace prefixd::index
