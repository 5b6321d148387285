#include "index/ivf/ivf_probe.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>

#include "attention/step/step.h"
#include "index/search/group_rank.h"

namespace prefixd::index {

namespace {

ListSlice SliceOf(const IvfLists& lists, uint32_t l, TokenRange rows) {
  const auto ids = lists.list(l).ids;
  const auto begin = std::lower_bound(ids.begin(), ids.end(), int64_t{rows.begin});
  const auto end = std::lower_bound(begin, ids.end(), int64_t{rows.end});
  return {l, static_cast<size_t>(begin - ids.begin()), static_cast<size_t>(end - ids.begin())};
}

}  // namespace

std::vector<ListSlice> ChooseLists(const IvfLists& lists, std::span<const float> queries,
                                   uint32_t group, float scale, float probe_fraction,
                                   TokenRange rows, size_t at_least) {
  const uint32_t n = lists.n_lists();
  const uint32_t probes =
      std::clamp<uint32_t>(static_cast<uint32_t>(std::ceil(double{probe_fraction} * n)), 1, n);
  std::vector<float> scores(size_t{group} * n);
  Scores(queries, group, LayerGeometry{.scale = scale}, lists.centroids(), scores);

  std::vector<bool> chosen(n, false);
  // Distance of a list from a head's best one, the least over heads: what to try next.
  std::vector<float> behind(n, std::numeric_limits<float>::infinity());
  std::vector<uint32_t> order(n);
  for (uint32_t g = 0; g < group; ++g) {
    const float* head = scores.data() + size_t{g} * n;
    std::iota(order.begin(), order.end(), 0);
    // Ties by number: the same query probes the same lists everywhere.
    std::nth_element(
        order.begin(), order.begin() + (probes - 1), order.end(),
        [head](uint32_t a, uint32_t b) { return head[a] != head[b] ? head[a] > head[b] : a < b; });
    for (uint32_t i = 0; i < probes; ++i) chosen[order[i]] = true;
    const float best = *std::max_element(head, head + n);
    for (uint32_t l = 0; l < n; ++l) behind[l] = std::min(behind[l], best - head[l]);
  }

  std::vector<ListSlice> slices;
  size_t found = 0;
  const auto take = [&](uint32_t l) {
    const ListSlice slice = SliceOf(lists, l, rows);
    if (slice.begin == slice.end) return;
    slices.push_back(slice);
    found += slice.end - slice.begin;
  };
  for (uint32_t l = 0; l < n; ++l) {
    if (chosen[l]) take(l);
  }
  if (found < at_least) {
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](uint32_t a, uint32_t b) { return behind[a] < behind[b]; });
    for (size_t i = 0; i < order.size() && found < at_least; ++i) {
      if (!chosen[order[i]]) take(order[i]);
    }
    std::sort(slices.begin(), slices.end(),
              [](const ListSlice& a, const ListSlice& b) { return a.list < b.list; });
  }
  return slices;
}

std::vector<uint32_t> WithinReach(std::span<const float> scores, uint32_t group, size_t n_codes,
                                  uint32_t k, double error) {
  const std::vector<double> ranks = GroupRanks(scores, group, LogSumExp(scores, group));
  std::vector<uint32_t> reach;
  double floor = -std::numeric_limits<double>::infinity();
  if (k + size_t{1} < ranks.size()) {
    std::vector<double> sorted = ranks;
    std::nth_element(sorted.begin(), sorted.begin() + k, sorted.end(), std::greater<>());
    // A rank s - L moves by at most 2 error (L by as much as s); so does the (k+1)-th best.
    floor = sorted[k] - 4 * error;
  }
  for (size_t i = 0; i < n_codes; ++i) {
    if (ranks[i] >= floor) reach.push_back(static_cast<uint32_t>(i));
  }
  return reach;
}

}  // namespace prefixd::index
