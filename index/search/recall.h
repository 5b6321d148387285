// How good a selection is, measured against the exact scores of all candidates. For tests, tuning
// and benchmarks.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "prefixd/result.h"

namespace prefixd::index {

struct SelectionQuality {
  // recall@K, K = ids.size(): the share of the exact top-K by the group ranking that was selected.
  // A token of the same rank as the K-th counts as found. 1 for K = 0.
  double recall = 1;
  // Per query head: attention mass over the candidates, sum p_i ([RC]), that the selection
  // recovers, and that the exact top-K of the group would.
  std::vector<double> mass, best_mass;

  // Least mass / best_mass over the heads: 1 is as good as exact, for the worst head.
  double worst_relative_mass() const;
};

// scores: [group][n] exact natural scores of the candidates, token first_id + i in column i.
// kInvalidArgument: shapes disagree, a score is not finite, an id is outside [first_id,
// first_id + n) or ids do not ascend strictly.
Result<SelectionQuality> MeasureSelection(std::span<const float> scores, uint32_t group,
                                          uint32_t first_id, std::span<const uint32_t> ids);

}  // namespace prefixd::index
