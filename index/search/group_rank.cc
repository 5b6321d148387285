#include "index/search/group_rank.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace prefixd::index {

std::vector<double> LogSumExp(std::span<const float> scores, uint32_t group) {
  const size_t n = scores.size() / group;
  std::vector<double> lse(group, -std::numeric_limits<double>::infinity());
  if (n == 0) return lse;
  for (uint32_t g = 0; g < group; ++g) {
    const auto head = scores.subspan(g * n, n);
    const float top = *std::max_element(head.begin(), head.end());
    double sum = 0;
    for (const float score : head) sum += std::exp(score - top);
    lse[g] = top + std::log(sum);
  }
  return lse;
}

std::vector<double> GroupRanks(std::span<const float> scores, uint32_t group,
                               std::span<const double> lse) {
  const size_t n = scores.size() / group;
  std::vector<double> ranks(n, -std::numeric_limits<double>::infinity());
  for (uint32_t g = 0; g < group; ++g) {
    for (size_t i = 0; i < n; ++i) ranks[i] = std::max(ranks[i], scores[g * n + i] - lse[g]);
  }
  return ranks;
}

}  // namespace prefixd::index
