// Which blocks of keys a search scans: those whose best key is likely to rank high. Internal to
// index/.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "index/code_search/code_ranks.h"
#include "index/codes/block_codes.h"
#include "index/codes/block_queries.h"
#include "index/search/key_index.h"
#include "prefixd/partition.h"

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

// What a query scans of a part. Blocks are counted from the part's first.
struct BlockChoice {
  BlockQueries queries;
  std::vector<uint32_t> chosen;  // ascending
  std::vector<uint16_t> some;    // [chosen], keys of it that are used
  std::vector<int16_t> bias;  // [heads][ld_bias] of every block: what it adds to its keys' scores
  size_t ld_bias = 0;
};

// Scans the means of all parts and chooses, over all of them, the best `fraction` of the blocks,
// or more, until they hold `at_least` keys that are used; ranked by the largest normalised score
// that is likely in them. What the others hold is added to `masses`, as if their scores were
// spread evenly around their means.
//   choices: of each part, with queries; the rest is filled in
void ChooseBlocks(const SearchRequest& request, std::span<const CodePart> parts, double fraction,
                  size_t at_least, std::span<BlockChoice> choices, HeadMasses& masses,
                  SearchScratch& scratch);

}  // namespace prefixd::index
