// What a search scans of one index of codes: every block that holds keys it may return. Internal to
// index/.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "index/codes/block_codes.h"
#include "index/codes/block_queries.h"
#include "index/search/key_index.h"
#include "prefixd/partition.h"
#include "prefixd/result.h"

namespace prefixd::index {

// Codes of tokens `used`, of one index.
struct CodePart {
  const BlockCodeBook* book = nullptr;
  BlockCodes codes;
  uint32_t first_token = 0;  // of the index's first key
  TokenRange used;

  // Windows that hold them, and the blocks of these: [begin, end).
  size_t first_window() const { return (used.begin - first_token) / kWindowKeys; }
  size_t end_window() const {
    return (size_t{used.end} - first_token + kWindowKeys - 1) / kWindowKeys;
  }
  size_t first_block() const { return first_window() * kWindowBlocks; }
  size_t end_block() const;
  bool uses(size_t place) const;  // whether a key stands there that is used
};

// A group's queries in the part's units, and where they look. Blocks are counted from the part's
// first.
struct PartScan {
  BlockQueries queries;
  std::vector<uint32_t> blocks;  // those with a key that is used, ascending
  std::vector<uint16_t> used;    // [blocks], how many
  std::vector<int16_t> bias;     // [heads][ld_bias]: what every block adds to its keys' scores
  size_t ld_bias = 0;
};

// Scans the means of the part's blocks. kInvalidArgument: scores overflow.
Result<PartScan> PreparePart(const SearchRequest& request, const CodePart& part,
                             SearchScratch& scratch);

}  // namespace prefixd::index
