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

HeadMasses::HeadMasses(std::span<const CodeScores> parts)
    : shift_(parts[0].queries->heads, -std::numeric_limits<double>::infinity()),
      sum_(shift_.size(), 0.0) {
  for (const CodeScores& part : parts) {
    for (size_t g = 0; g < shift_.size(); ++g) {
      const int16_t* v = part.values + g * part.ld;
      const auto [most, least] = Extremes(v, part.n);
      const float mul = part.queries->mul[g], top = mul * float(mul >= 0 ? most : least);
      double shift = double{top} + part.queries->add[g], sum = 0;
      if (part.softcap > 0) {
        shift = part.softcap * std::tanh(shift / part.softcap);
        for (size_t i = 0; i < part.n; ++i) sum += std::exp(part.Score(g, i) - shift);
      } else {
        sum = CodeScan().exp_sum(v, part.n, mul, -top);
      }
      const double common = std::max(shift_[g], shift);
      sum_[g] = sum_[g] * std::exp(shift_[g] - common) + sum * std::exp(shift - common);
      shift_[g] = common;
    }
  }
}

void HeadMasses::Correct(std::span<const CodeScores> parts, std::span<const uint32_t> listed,
                         std::span<const float> exact, size_t ld) {
  std::vector<int16_t> values;
  for (size_t g = 0; g < sum_.size(); ++g) {
    // By codes: part for part, for each has its own units.
    double by_codes = 0;
    auto token = listed.begin();
    for (const CodeScores& part : parts) {
      values.clear();
      double capped = 0;
      for (; token != listed.end() && *token - part.first_token < part.n; ++token) {
        const size_t i = *token - part.first_token;
        if (part.softcap > 0) capped += std::exp(part.Score(g, i) - shift_[g]);
        values.push_back(part.values[g * part.ld + i]);
      }
      by_codes += part.softcap > 0
                      ? capped
                      : CodeScan().exp_sum(values.data(), values.size(), part.queries->mul[g],
                                           static_cast<float>(part.queries->add[g] - shift_[g]));
    }
    const float* row = exact.data() + g * ld;
    const double shift = std::max(shift_[g], double{*std::max_element(row, row + ld)});
    double truth = 0;
    for (size_t i = 0; i < ld; ++i) truth += std::exp(static_cast<float>(row[i] - shift));
    // What is left when the short list's terms go; the sum and the terms are rounded differently.
    const double rest = std::max(0.0, sum_[g] - by_codes);
    sum_[g] = rest * std::exp(shift_[g] - shift) + truth;
    shift_[g] = shift;
  }
}

namespace {

// max_g score - lse of every key of the part.
void RankKeys(const CodeScores& part, std::span<const double> lse, float* ranks) {
  const CodeQueries& queries = *part.queries;
  if (part.softcap > 0) {
    std::fill_n(ranks, part.n, -kInf);
    for (uint32_t g = 0; g < queries.heads; ++g) {
      for (size_t i = 0; i < part.n; ++i) {
        ranks[i] = std::max(ranks[i], static_cast<float>(part.Score(g, i) - lse[g]));
      }
    }
    return;
  }
  std::vector<float> add(queries.heads);
  for (uint32_t g = 0; g < queries.heads; ++g) {
    add[g] = static_cast<float>(queries.add[g] - lse[g]);
  }
  CodeScan().max_rank(part.values, part.ld, queries.heads, queries.mul.data(), add.data(), part.n,
                      ranks);
}

}  // namespace

void ShortList(std::span<const CodeScores> parts, const HeadMasses& masses, uint32_t count,
               SearchScratch& scratch) {
  const std::vector<double> lse = masses.LogSumExp();
  size_t n = 0;
  for (const CodeScores& part : parts) n += part.n;
  auto& ranks = scratch.ranks;
  if (ranks.size() < n) ranks.resize(n);
  size_t at = 0;
  for (const CodeScores& part : parts) {
    RankKeys(part, lse, ranks.data() + at);
    at += part.n;
  }
  const float floor = KthLargest(std::span<const float>(ranks).first(n), count, scratch.scores);
  auto& found = scratch.found;
  if (found.size() < n) found.resize(n);
  const size_t n_found = CodeScan().collect(ranks.data(), n, floor, 0, found.data());
  // Integers are often equal: of those at the floor the first ones, as far as there is room.
  size_t room = count;
  for (size_t j = 0; j < n_found; ++j) room -= ranks[found[j]] > floor;
  scratch.ids.clear();
  auto part = parts.begin();
  size_t begin = 0;  // of the part, among all ranks
  for (size_t j = 0; j < n_found; ++j) {
    const bool tie = ranks[found[j]] == floor;
    if (tie && room == 0) continue;
    room -= tie;
    while (found[j] - begin >= part->n) begin += (part++)->n;
    scratch.ids.push_back(part->first_token + static_cast<uint32_t>(found[j] - begin));
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
  std::sort(selection.ids.begin(), selection.ids.end());
  for (const double l : lse) {
    selection.cuts.push_back({static_cast<float>(l + theta), CutKind::kApproximate});
  }
  return selection;
}

}  // namespace prefixd::index
