#include "index/ranking/group_rules.h"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "index/codes/code_scan.h"
#include "index/ranking/group_ranking.h"
#include "attention/kernels/kernels.h"
#include "index/ranking/top_ranks.h"
#include "prefixd/selection.h"

namespace prefixd {
namespace {

constexpr float kInfScore = std::numeric_limits<float>::infinity();
constexpr double kLeastTerm = std::numeric_limits<float>::min();

// Log-sum-exp of the finite scores.
double LogSumExp(std::span<const float> scores) {
  float max = -kInfScore;
  for (const float s : scores) {
    if (std::isfinite(s)) max = std::max(max, s);
  }
  if (max == -kInfScore) return 0;
  double sum = 0;
  for (const float s : scores) {
    if (std::isfinite(s)) sum += std::exp(double{s} - max);
  }
  return max + std::log(sum);
}

std::vector<float> SumRanks(std::span<const float> scores, uint32_t group, uint32_t n,
                            std::span<const double> lse) {
  std::vector<float> rank(n), term(n);
  for (uint32_t g = 0; g < group; ++g) {
    const auto row = scores.subspan(size_t{g} * n, n);
    Kernels().exp_shifted(row.data(), n, static_cast<float>(lse[g]), term.data());
    for (uint32_t i = 0; i < n; ++i) rank[i] += std::isnan(row[i]) ? kInfScore : term[i];
  }
  return rank;
}

// max_g of score - lse. NaN ranks first, so that the step can name the row.
std::vector<float> MaxRanks(std::span<const float> scores, uint32_t group, uint32_t n,
                            std::span<const double> lse) {
  std::vector<float> rank(n, -kInfScore);
  bool any_nan = false;
  for (uint32_t g = 0; g < group; ++g) {
    const float* row = scores.data() + size_t{g} * n;
    const auto shift = static_cast<float>(lse[g]);
    int32_t odd = 0;
    for (uint32_t i = 0; i < n; ++i) {
      const float normalised = row[i] - shift;
      rank[i] = normalised > rank[i] ? normalised : rank[i];
      odd |= normalised != normalised ? 1 : 0;
    }
    any_nan |= odd != 0;
  }
  for (size_t i = 0; any_nan && i < size_t{group} * n; ++i) {
    if (std::isnan(scores[i])) rank[i % n] = kInfScore;
  }
  return rank;
}

// Minus the best place of each token among a head's k best, from 0 on; -inf for the others.
std::vector<float> UnionRanks(std::span<const float> scores, uint32_t group, uint32_t n,
                              uint32_t k) {
  std::vector<float> rank(n, -kInfScore);
  std::vector<uint32_t> order(n);
  for (uint32_t g = 0; g < group; ++g) {
    const auto row = scores.subspan(size_t{g} * n, n);
    const auto score = [&](uint32_t i) { return std::isnan(row[i]) ? kInfScore : row[i]; };
    const auto better = [&](uint32_t a, uint32_t b) {
      return score(a) != score(b) ? score(a) > score(b) : a < b;
    };
    std::iota(order.begin(), order.end(), 0u);
    const auto end = order.begin() + std::min(k, n);
    std::nth_element(order.begin(), end, order.end(), better);
    std::sort(order.begin(), end, better);
    for (auto at = order.begin(); at != end; ++at) {
      rank[*at] = std::max(rank[*at], -static_cast<float>(at - order.begin()));
    }
  }
  return rank;
}

// The largest that lies below `end`, or -inf.
float LargestBelow(std::span<const float> x, float end) {
  // Lane by lane, or each would wait for the one before.
  constexpr size_t kLanes = 16;
  float most[kLanes];
  std::ranges::fill(most, -kInfScore);
  size_t i = 0;
  for (; i + kLanes <= x.size(); i += kLanes) {
    for (size_t l = 0; l < kLanes; ++l) {
      const float value = x[i + l] < end ? x[i + l] : -kInfScore;
      most[l] = value > most[l] ? value : most[l];
    }
  }
  for (; i < x.size(); ++i) {
    if (x[i] < end) most[0] = std::max(most[0], x[i]);
  }
  return *std::ranges::max_element(most);
}

// shift + rank, rounded up so that no unread score lies above its cut: ranks were differences in
// float32, and exponentials of them.
float Above(double shift, double rank) {
  const double up = shift + rank + 0x1p-20 * (1 + std::abs(shift) + std::abs(rank));
  return std::nextafter(static_cast<float>(up), kInfScore);
}

}  // namespace

Selection SelectByGroup(GroupRule rule, std::span<const float> scores, uint32_t group, uint32_t n,
                        uint32_t k, uint32_t first_id, bool scores_complete,
                        std::span<const double> lse) {
  assert(scores.size() >= size_t{group} * n && (lse.empty() || lse.size() == group));
  if (k >= n || (rule == GroupRule::kMax && lse.empty())) {
    return SelectByGroupMax(scores, group, n, k, first_id, scores_complete);
  }
  std::vector<double> own;
  if (lse.empty()) {
    for (uint32_t g = 0; g < group; ++g) own.push_back(LogSumExp(scores.subspan(size_t{g} * n, n)));
    lse = own;
  }
  std::vector<float> rank;
  if (rule == GroupRule::kUnion) {
    rank = UnionRanks(scores, group, n, k);
  } else if (rule == GroupRule::kSum) {
    rank = SumRanks(scores, group, n, lse);
  } else {
    rank = MaxRanks(scores, group, n, lse);
  }
  float kth = kInfScore, theta = -kInfScore;
  size_t room = 0;
  if (k > 0) {
    std::vector<float> scratch;
    kth = KthLargest(rank, k, scratch);
    const auto above = std::ranges::count_if(rank, [&](float r) { return r > kth; });
    assert(above < k);
    room = k - static_cast<size_t>(above);
  }
  Selection out;
  out.keys_scanned = n;
  out.ids.resize(n);
  out.ids.resize(CodeScan().places_from(rank.data(), n, kth, out.ids.data()));
  if (out.ids.size() > k) {  // of equal ones the last stay out
    std::erase_if(out.ids, [&](uint32_t i) {
      if (rank[i] > kth) return false;
      const bool left = room == 0;
      room -= !left;
      return left;
    });
    theta = kth;
  } else {
    theta = LargestBelow(rank, kth);
  }
  std::vector<float> highest_left(group, -kInfScore);
  if (rule == GroupRule::kUnion) {
    size_t next = 0;  // of out.ids
    for (uint32_t i = 0; i < n; ++i) {
      if (next < out.ids.size() && out.ids[next] == i) {
        ++next;
        continue;
      }
      for (uint32_t g = 0; g < group; ++g) {
        highest_left[g] = std::max(highest_left[g], scores[size_t{g} * n + i]);
      }
    }
  }
  out.ids.shrink_to_fit();
  for (uint32_t& id : out.ids) id += first_id;
  const CutKind kind = scores_complete ? CutKind::kExact : CutKind::kApproximate;
  for (uint32_t g = 0; g < group; ++g) {
    if (rule == GroupRule::kUnion) {
      out.cuts.push_back({highest_left[g], kind});
    } else {
      // Terms below the smallest normal number were counted as nothing.
      const double above = rule == GroupRule::kSum
                               ? std::log(std::max(double{theta}, kLeastTerm * group))
                               : double{theta};
      // Ranks were taken against the rounded log-sum-exp.
      const double shift = static_cast<float>(lse[g]);
      out.cuts.push_back({std::isfinite(above) ? Above(shift, above) : theta, kind});
    }
  }
  return out;
}

}  // namespace prefixd
