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

// What a scan left: head g's score of key i is mul[g] values[g * ld + i] + add[g], softcapped.
struct CodeScores {
  const int16_t* values = nullptr;
  size_t ld = 0, n = 0;
  const CodeQueries* queries = nullptr;
  float softcap = 0;

  double Score(size_t head, size_t i) const;
};

// The sum of exp(score) over all candidates, for each head: what group rules normalise by (spec
// §2). First by codes alone; then the short list's terms are replaced by exact ones, which carry
// most of the mass.
class HeadMasses {
 public:
  // [heads], natural.
  std::vector<double> LogSumExp() const;
  // listed: tokens of the short list, of which first_token is key 0 of `scores`. exact:
  // [heads][ld], of the short list and of every candidate that has no code, in any order.
  void Correct(const CodeScores& scores, uint32_t first_token, std::span<const uint32_t> listed,
               std::span<const float> exact, size_t ld);

 private:
  friend HeadMasses MassesOf(const CodeScores& scores);
  std::vector<double> shift_, sum_;  // sum_ exp(shift_)
};

HeadMasses MassesOf(const CodeScores& scores);

// Appends to scratch.ids the `count` (< scores.n) keys of the best group ranks, ascending, key 0
// being token first_token. Of equal ranks at the end those that come first.
void AppendShortList(const CodeScores& scores, const HeadMasses& masses, uint32_t count,
                     uint32_t first_token, SearchScratch& scratch);

// The k best of `ids` (ascending) by max_g scores[g][i] - lse[g], with approximate cuts.
//   scores: [heads][ids.size()]
Selection SelectRanked(std::span<const uint32_t> ids, std::span<const float> scores,
                       std::span<const double> lse, uint32_t k);

}  // namespace prefixd::index
