// From the integers of a scan to a short list, and from exact scores of the short list to the set.
// Internal to index/.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "attention/key_codes.h"
#include "attention/selection.h"
#include "index/key_index.h"

namespace prefixd::index {

// What the scan of one index left: head g's score of key i, token first_token + i, is
// mul[g] values[g * ld + i] + add[g], softcapped.
struct CodeScores {
  const int16_t* values = nullptr;
  size_t ld = 0, n = 0;
  uint32_t first_token = 0;
  const CodeQueries* queries = nullptr;
  float softcap = 0;

  double OfValue(size_t head, int16_t value) const;
  double Score(size_t head, size_t i) const { return OfValue(head, values[head * ld + i]); }
};

// The sum of exp(score) over all candidates, for each head: what group rules normalise by (spec
// §2). First by codes alone, as they are scanned; then the short list's terms are replaced by exact
// ones, which carry most of the mass.
class HeadMasses {
 public:
  explicit HeadMasses(size_t heads);
  // Adds keys [begin, begin + n) of the part, n >= 1.
  void Add(const CodeScores& part, size_t begin, size_t n);
  // [heads], natural.
  std::vector<double> LogSumExp() const;
  // listed: the short list. exact: [heads][ld], of the short list and of every candidate that has
  // no code, in any order.
  void Correct(std::span<const CodeScores> parts, std::span<const uint32_t> listed,
               std::span<const float> exact, size_t ld);

 private:
  std::vector<double> shift_, sum_;  // sum_ exp(shift_)
};

// Into scratch.ids the `count` keys of the best group ranks, ascending as the parts are. Fewer than
// all keys; of equal ranks at the end those that come first. A sample of all keys tells where the
// ranks of the best begin; a rank is a function of one integer for each head, so that finding the
// keys above it is comparing integers, and only these are ranked.
void ShortList(std::span<const CodeScores> parts, const HeadMasses& masses, uint32_t count,
               SearchScratch& scratch);

}  // namespace prefixd::index
