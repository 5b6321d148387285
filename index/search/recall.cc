#include "index/search/recall.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>

#include "index/search/group_rank.h"

namespace prefixd::index {

namespace {

Status CheckInputs(std::span<const float> scores, uint32_t group, uint32_t first_id,
                   std::span<const uint32_t> ids) {
  if (group == 0 || scores.size() % group != 0) {
    return InvalidArgument("recall: " + std::to_string(scores.size()) + " scores of " +
                           std::to_string(group) + " heads");
  }
  const size_t n = scores.size() / group;
  for (size_t j = 0; j < ids.size(); ++j) {
    if (ids[j] < first_id || ids[j] - first_id >= n) {
      return InvalidArgument("recall: token " + std::to_string(ids[j]) + " has no score");
    }
    if (j != 0 && ids[j] <= ids[j - 1]) {
      return InvalidArgument("recall: token " + std::to_string(ids[j]) + " is out of order");
    }
  }
  if (!std::all_of(scores.begin(), scores.end(), [](float s) { return std::isfinite(s); })) {
    return InvalidArgument("recall: a score is NaN or infinite");
  }
  return {};
}

// sum over `columns` of p_i for each head.
std::vector<double> MassOf(std::span<const float> scores, std::span<const double> lse,
                           std::span<const uint32_t> columns) {
  const size_t n = scores.size() / lse.size();
  std::vector<double> mass(lse.size(), 0.0);
  for (size_t g = 0; g < lse.size(); ++g) {
    for (const uint32_t i : columns) mass[g] += std::exp(scores[g * n + i] - lse[g]);
  }
  return mass;
}

}  // namespace

double SelectionQuality::worst_relative_mass() const {
  double worst = 1;
  for (size_t g = 0; g < mass.size(); ++g) {
    if (best_mass[g] > 0) worst = std::min(worst, mass[g] / best_mass[g]);
  }
  return worst;
}

Result<SelectionQuality> MeasureSelection(std::span<const float> scores, uint32_t group,
                                          uint32_t first_id, std::span<const uint32_t> ids) {
  PREFIXD_TRY(CheckInputs(scores, group, first_id, ids));
  const std::vector<double> lse = LogSumExp(scores, group);
  const std::vector<double> ranks = GroupRanks(scores, group, lse);
  const size_t k = ids.size();
  std::vector<uint32_t> selected(k), best(ranks.size());
  for (size_t j = 0; j < k; ++j) selected[j] = ids[j] - first_id;
  std::iota(best.begin(), best.end(), 0);
  std::partial_sort(best.begin(), best.begin() + k, best.end(), [&](uint32_t a, uint32_t b) {
    return ranks[a] != ranks[b] ? ranks[a] > ranks[b] : a < b;
  });
  best.resize(k);

  SelectionQuality quality;
  quality.mass = MassOf(scores, lse, selected);
  quality.best_mass = MassOf(scores, lse, best);
  if (k != 0) {
    const double last = ranks[best.back()];
    const auto hits = std::count_if(selected.begin(), selected.end(),
                                    [&](uint32_t i) { return ranks[i] >= last; });
    quality.recall = static_cast<double>(hits) / static_cast<double>(k);
  }
  return quality;
}

}  // namespace prefixd::index
