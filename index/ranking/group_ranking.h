// The ranking of mid tokens by which the query heads of one KV head share a set
// (docs/mathematics.md). Pure functions.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "prefixd/selection.h"

namespace prefixd {

// Picks the k tokens ranked by the best of the group's normalised scores s_i^g - L_g, where
// L_g is the logsumexp of head g's scores over all candidates; c_g = L_g + threshold with the
// threshold being the largest rank value left out (docs/mathematics.md). k >= n selects everything
// (then cuts are exact at -infinity). Positions are candidate indices plus `first_id`.
//   scores: [G][n] row-major, natural scaled scores (softcap applied)
//   scores_complete: false when scores are of a subset or approximate; cuts are then marked so
//   lse: [G] L_g, of `scores` that are a subset of the candidates; empty: those of `scores`
Selection SelectByGroupMax(std::span<const float> scores, uint32_t group, uint32_t n, uint32_t k,
                           uint32_t first_id, bool scores_complete,
                           std::span<const double> lse = {});

// The same ranking for several k at once: the first k of `best` are what SelectByGroupMax takes.
struct GroupRanking {
  uint32_t n = 0;
  std::vector<uint32_t> best;  // candidates, best first, of equal rank the lowest first
  std::vector<float> rank;     // of each of `best`
  std::vector<float> lse;      // [G] L_g

  // Exact cuts when the first k are retrieved. REQUIRES: k < best.size() or best.size() == n.
  std::vector<Cut> Cuts(uint32_t k) const;
};
// The best most + 1 candidates (so that any k up to `most` has its cuts).
GroupRanking RankByGroupMax(std::span<const float> scores, uint32_t group, uint32_t n,
                            uint32_t most);

}  // namespace prefixd
