#include <algorithm>
#include <cassert>
#include <cmath>
#include <numeric>
#include <utility>

#include "attention/kernels/kernels.h"
#include "index/ranking/group_ranking.h"
#include "index/ranking/top_ranks.h"
#include "prefixd/selection.h"

namespace prefixd {
namespace {

constexpr float kInfRank = std::numeric_limits<float>::infinity();

// logsumexp of the finite scores; 0 when there are none, so that nothing below turns into NaN.
float LogSumExp(std::span<const float> scores, std::vector<float>& scratch) {
  float max = -kInfRank;
  const bool finite = Kernels().finite_max(scores.data(), scores.size(), &max);
  scratch.assign(scores.begin(), scores.end());
  if (!finite) {
    std::erase_if(scratch, [](float s) { return !std::isfinite(s); });
    Kernels().finite_max(scratch.data(), scratch.size(), &max);
  }
  if (scratch.empty()) return 0;
  const double sum = Kernels().exp_shifted(scratch.data(), scratch.size(), max, scratch.data());
  return static_cast<float>(max + std::log(sum));
}

// [group] L_g of [group][n] scores.
std::vector<float> LogSumExps(std::span<const float> scores, uint32_t group, uint32_t n) {
  std::vector<float> lse(group), scratch;
  for (uint32_t g = 0; g < group; ++g) {
    lse[g] = LogSumExp(scores.subspan(size_t{g} * n, n), scratch);
  }
  return lse;
}

// rank[i] = max over the group of s_i^g - L_g. NaN ranks first: the step then reads that row and
// refuses it by name, instead of the selection hiding it.
std::vector<float> GroupMaxRanks(std::span<const float> scores, uint32_t n,
                                 std::span<const float> lse) {
  std::vector<float> rank(n, -kInfRank);
  for (size_t g = 0; g < lse.size(); ++g) {
    const std::span<const float> row = scores.subspan(g * n, n);
    const float shift = lse[g];
    for (uint32_t i = 0; i < n; ++i) {
      const float normalised = row[i] - shift;
      rank[i] = normalised > rank[i] ? normalised : rank[i];
      if (std::isnan(normalised)) rank[i] = kInfRank;
    }
  }
  return rank;
}

// L + theta, rounded up so that rounding never lets an unread score lie above its cut.
float CutAbove(float lse, float theta) {
  if (!std::isfinite(theta)) return theta;
  const double cut = double{lse} + theta + 0x1p-24 * std::abs(double{theta});
  const float rounded = static_cast<float>(cut);
  return rounded < cut ? std::nextafter(rounded, kInfRank) : rounded;
}

}  // namespace

Selection SelectByGroupMax(std::span<const float> scores, uint32_t group, uint32_t n, uint32_t k,
                           uint32_t first_id, bool scores_complete,
                           std::span<const double> all_lse) {
  assert(scores.size() >= size_t{group} * n && (all_lse.empty() || all_lse.size() == group));
  Selection selection;
  selection.keys_scanned = n;
  selection.cuts.resize(group);
  if (k >= n) {
    selection.ids.resize(n);
    for (uint32_t i = 0; i < n; ++i) selection.ids[i] = first_id + i;
    // Of a subset, having taken all of it says nothing about the tokens never scored.
    if (scores_complete) std::ranges::fill(selection.cuts, Cut{-kInfRank, CutKind::kExact});
    return selection;
  }

  // Ranks and cuts take the same rounded log-sum-exp, so that rounding it moves no cut.
  const std::vector<float> lse = all_lse.empty()
                                     ? LogSumExps(scores, group, n)
                                     : std::vector<float>(all_lse.begin(), all_lse.end());
  const std::vector<float> rank = GroupMaxRanks(scores, n, lse);
  // kth: the k-th largest rank. Everything above it is in; of those equal to it the lowest ids
  // are, as far as there is room.
  float kth = kInfRank;
  size_t room_for_ties = 0;
  if (k > 0) {
    std::vector<float> scratch;
    kth = KthLargest(rank, k, scratch);
    room_for_ties = k;
    for (float r : rank) room_for_ties -= r > kth;
  }
  selection.ids.reserve(k);
  float theta = -kInfRank;  // largest rank left out
  for (uint32_t i = 0; i < n; ++i) {
    const bool tie = rank[i] == kth && room_for_ties > 0;
    if (rank[i] > kth || tie) {
      selection.ids.push_back(first_id + i);
      room_for_ties -= tie;
    } else {
      theta = std::max(theta, rank[i]);
    }
  }
  const CutKind kind = scores_complete ? CutKind::kExact : CutKind::kApproximate;
  for (uint32_t g = 0; g < group; ++g) selection.cuts[g] = {CutAbove(lse[g], theta), kind};
  return selection;
}

std::vector<Cut> GroupRanking::Cuts(uint32_t k) const {
  std::vector<Cut> cuts(lse.size(), Cut{-kInfRank, CutKind::kExact});
  if (k >= n) return cuts;
  assert(k < best.size());
  for (size_t g = 0; g < lse.size(); ++g) cuts[g].score = CutAbove(lse[g], rank[k]);
  return cuts;
}

GroupRanking RankByGroupMax(std::span<const float> scores, uint32_t group, uint32_t n,
                            uint32_t most) {
  GroupRanking ranking;
  ranking.n = n;
  ranking.lse = LogSumExps(scores, group, n);
  const std::vector<float> rank = GroupMaxRanks(scores, n, ranking.lse);
  const size_t kept = std::min(n, most == UINT32_MAX ? most : most + 1);
  std::vector<uint32_t> order(n);
  std::iota(order.begin(), order.end(), 0u);
  std::partial_sort(order.begin(), order.begin() + kept, order.end(), [&](uint32_t a, uint32_t b) {
    return rank[a] != rank[b] ? rank[a] > rank[b] : a < b;
  });
  order.resize(kept);
  for (uint32_t i : order) ranking.rank.push_back(rank[i]);
  ranking.best = std::move(order);
  return ranking;
}

}  // namespace prefixd
