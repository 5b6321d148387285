// From the integers of a scan to a short list, and from exact scores of the short list to the set.
// Internal to index/.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "index/codes/block_codes.h"
#include "index/codes/key_codes.h"
#include "index/search/key_index.h"

namespace prefixd::index {

// The integer score of a key that is not a candidate, though its block was scanned. Below all
// others.
inline constexpr int16_t kNoScore = std::numeric_limits<int16_t>::min();

// What the scan of some blocks of one index left: head g's score of the key at place i is
// mul[g] values[g * ld + i] + add[g], softcapped; or none, where that is kNoScore.
struct CodeScores {
  const int16_t* values = nullptr;
  size_t ld = 0, n = 0;
  const CodeQueries* queries = nullptr;
  float softcap = 0;
  // Places [32 j, 32 j + 32) are those of block first_block + blocks[j].
  std::span<const uint32_t> blocks;
  size_t first_block = 0;
  const BlockCodes* codes = nullptr;
  uint32_t first_token = 0;
  std::span<const float> margin;  // [heads]: how far a score by its code may be too low

  double OfValue(size_t head, int16_t value) const;
  double Score(size_t head, size_t i) const { return OfValue(head, values[head * ld + i]); }
  uint32_t Token(size_t i) const { return first_token + codes->key(Place(i)); }
  void PrefetchToken(size_t i) const { __builtin_prefetch(&codes->tokens[Place(i)]); }
  size_t Place(size_t i) const {  // among all of the index
    return (first_block + blocks[i / kCodeBlockKeys]) * kCodeBlockKeys + i % kCodeBlockKeys;
  }
};

// A short list's integer scores in one part: head g's of the i-th is values[g * ld + i].
struct ListedPart {
  const int16_t* values = nullptr;
  size_t ld = 0, n = 0;
};

// The sum of exp(score) over all candidates, for each head: what ranks are normalised by (spec
// §2). First by codes alone, as they are scanned; then the short list's terms are replaced by exact
// ones, which carry most of the mass.
class HeadMasses {
 public:
  explicit HeadMasses(size_t heads);
  // Adds places [begin, begin + n) of the part, n >= 1, `none` of which have no score.
  void Add(const CodeScores& part, size_t begin, size_t n, size_t none);
  // [heads], natural.
  std::vector<double> LogSumExp() const;
  // listed: the short list. exact: [heads][ld], of the short list and of every candidate that has
  // no code, in any order.
  void Correct(std::span<const CodeScores> parts, std::span<const ListedPart> listed,
               std::span<const float> exact, size_t ld);

 private:
  std::vector<double> shift_, sum_;  // sum_ exp(shift_)
};

// Into scratch.ids the tokens, ascending, of the keys that may be among the `k` best: those whose
// group rank, each head's score raised by its margin, reaches the k + 1st best rank as it is. At
// least k + 1 of them and at most `most`, the best; fewer than all that have scores; of equal ranks
// at the end those that come first. `range` holds all tokens. What is returned, of each part,
// borrows from scratch.picked. A sample of all keys tells where the ranks of the best begin; a rank
// is a function of one integer for each head, so that finding the keys above it is comparing
// integers, and only these are ranked.
std::vector<ListedPart> ShortList(std::span<const CodeScores> parts, const HeadMasses& masses,
                                  uint32_t k, uint32_t most, TokenRange range,
                                  SearchScratch& scratch);

}  // namespace prefixd::index
