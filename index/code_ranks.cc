#include "index/code_ranks.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "attention/code_scan.h"
#include "attention/top_ranks.h"

namespace prefixd::index {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

// The largest and least of a head's integers.
std::pair<int16_t, int16_t> Extremes(const int16_t* v, size_t n) {
  int16_t most = v[0], least = v[0];
  for (size_t i = 1; i < n; ++i) {
    most = std::max(most, v[i]);
    least = std::min(least, v[i]);
  }
  return {most, least};
}

}  // namespace

double CodeScores::Score(size_t head, size_t i) const {
  const double s = double{queries->mul[head]} * values[head * ld + i] + queries->add[head];
  return softcap > 0 ? softcap * std::tanh(s / softcap) : s;
}

std::vector<double> HeadMasses::LogSumExp() const {
  std::vector<double> lse;
  for (size_t g = 0; g < sum_.size(); ++g) lse.push_back(shift_[g] + std::log(sum_[g]));
  return lse;
}

HeadMasses MassesOf(const CodeScores& scores) {
  HeadMasses masses;
  const CodeQueries& queries = *scores.queries;
  for (uint32_t g = 0; g < queries.heads; ++g) {
    const int16_t* v = scores.values + g * scores.ld;
    const auto [most, least] = Extremes(v, scores.n);
    const float mul = queries.mul[g], top = mul * float(mul >= 0 ? most : least);
    double sum = 0;
    if (scores.softcap > 0) {
      const double shift = scores.softcap * std::tanh((top + queries.add[g]) / scores.softcap);
      for (size_t i = 0; i < scores.n; ++i) sum += std::exp(scores.Score(g, i) - shift);
      masses.shift_.push_back(shift);
    } else {
      sum = CodeScan().exp_sum(v, scores.n, mul, -top);
      masses.shift_.push_back(double{top} + queries.add[g]);
    }
    masses.sum_.push_back(sum);
  }
  return masses;
}

void HeadMasses::Correct(const CodeScores& scores, uint32_t first_token,
                         std::span<const uint32_t> listed, std::span<const float> exact,
                         size_t ld) {
  for (size_t g = 0; g < sum_.size(); ++g) {
    double by_codes = 0, truth = 0;
    for (const uint32_t token : listed) {
      by_codes += std::exp(scores.Score(g, token - first_token) - shift_[g]);
    }
    const float* row = exact.data() + g * ld;
    const float top = *std::max_element(row, row + ld);
    const double shift = std::max(shift_[g], double{top});
    for (size_t i = 0; i < ld; ++i) truth += std::exp(row[i] - shift);
    // What is left when the short list's terms go; the sum and the terms are rounded differently.
    const double rest = std::max(0.0, sum_[g] - by_codes);
    sum_[g] = rest * std::exp(shift_[g] - shift) + truth;
    shift_[g] = shift;
  }
}

void AppendShortList(const CodeScores& scores, const HeadMasses& masses, uint32_t count,
                     uint32_t first_token, SearchScratch& scratch) {
  const CodeQueries& queries = *scores.queries;
  const std::vector<double> lse = masses.LogSumExp();
  auto& ranks = scratch.ranks;
  if (ranks.size() < scores.n) ranks.resize(scores.n);
  if (scores.softcap > 0) {
    std::fill_n(ranks.begin(), scores.n, -kInf);
    for (uint32_t g = 0; g < queries.heads; ++g) {
      for (size_t i = 0; i < scores.n; ++i) {
        ranks[i] = std::max(ranks[i], static_cast<float>(scores.Score(g, i) - lse[g]));
      }
    }
  } else {
    std::vector<float> add(queries.heads);
    for (uint32_t g = 0; g < queries.heads; ++g) {
      add[g] = static_cast<float>(queries.add[g] - lse[g]);
    }
    CodeScan().max_rank(scores.values, scores.ld, queries.heads, queries.mul.data(), add.data(),
                        scores.n, ranks.data());
  }
  const std::span<const float> rank = std::span(ranks).first(scores.n);
  const float floor = KthLargest(rank, count, scratch.scores);
  auto& found = scratch.found;
  if (found.size() < scores.n) found.resize(scores.n);
  const size_t n_found =
      CodeScan().collect(rank.data(), scores.n, floor, first_token, found.data());
  // Integers are often equal: of those at the floor the first ones, as far as there is room.
  size_t above = 0;
  for (size_t j = 0; j < n_found; ++j) above += rank[found[j] - first_token] > floor;
  size_t room = count - above;
  for (size_t j = 0; j < n_found; ++j) {
    const bool tie = rank[found[j] - first_token] == floor;
    if (tie && room == 0) continue;
    room -= tie;
    scratch.ids.push_back(found[j]);
  }
}

Selection SelectRanked(std::span<const uint32_t> ids, std::span<const float> scores,
                       std::span<const double> lse, uint32_t k) {
  const size_t n = ids.size();
  std::vector<float> rank(n, -kInf), scratch;
  for (size_t g = 0; g < lse.size(); ++g) {
    for (size_t i = 0; i < n; ++i) {
      rank[i] = std::max(rank[i], static_cast<float>(scores[g * n + i] - lse[g]));
    }
  }
  float kth = kInf, theta = -kInf;
  size_t room = 0;  // for tokens of the k-th's rank
  if (k > 0) {
    kth = KthLargest(rank, k, scratch);
    room = k - static_cast<size_t>(
                   std::count_if(rank.begin(), rank.end(), [&](float r) { return r > kth; }));
  }
  Selection selection;
  selection.ids.reserve(k);
  for (size_t i = 0; i < n; ++i) {
    if (rank[i] > kth || (rank[i] == kth && room > 0)) {
      room -= rank[i] == kth;
      selection.ids.push_back(ids[i]);
    } else {
      theta = std::max(theta, rank[i]);
    }
  }
  for (const double l : lse) {
    selection.cuts.push_back({static_cast<float>(l + theta), CutKind::kApproximate});
  }
  return selection;
}

}  // namespace prefixd::index
