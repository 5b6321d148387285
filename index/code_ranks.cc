#include "index/code_ranks.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "attention/code_scan.h"
#include "attention/top_ranks.h"

namespace prefixd::index {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

}  // namespace

double CodeScores::OfValue(size_t head, int16_t value) const {
  const double s = double{queries->mul[head]} * value + queries->add[head];
  return softcap > 0 ? softcap * std::tanh(s / softcap) : s;
}

std::vector<double> HeadMasses::LogSumExp() const {
  std::vector<double> lse;
  for (size_t g = 0; g < sum_.size(); ++g) lse.push_back(shift_[g] + std::log(sum_[g]));
  return lse;
}

HeadMasses::HeadMasses(size_t heads) : shift_(heads, -kInf), sum_(heads, 0.0) {}

void HeadMasses::Add(const CodeScores& part, size_t begin, size_t n) {
  for (size_t g = 0; g < shift_.size(); ++g) {
    const int16_t* v = part.values + g * part.ld + begin;
    const double top = part.OfValue(g, CodeScan().largest(v, n));
    if (top > shift_[g]) {
      sum_[g] *= std::exp(shift_[g] - top);
      shift_[g] = top;
    }
    if (part.softcap > 0) {
      for (size_t i = begin; i < begin + n; ++i) sum_[g] += std::exp(part.Score(g, i) - shift_[g]);
    } else {
      sum_[g] += CodeScan().exp_sum(v, n, part.queries->mul[g],
                                    static_cast<float>(part.queries->add[g] - shift_[g]));
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
    const double truth = CodeScan().exp_total(row, ld, static_cast<float>(-shift));
    // What is left when the short list's terms go; the sum and the terms are rounded differently.
    const double rest = std::max(0.0, sum_[g] - by_codes);
    sum_[g] = rest * std::exp(shift_[g] - shift) + truth;
    shift_[g] = shift;
  }
}

namespace {

// Where the ranks of the best are looked for: a sample of so many keys, of few keys every 16th.
constexpr size_t kSampledKeys = 4096, kLeastStride = 16;

// max_g score - lse.
float RankOf(const CodeScores& part, std::span<const double> lse, size_t i) {
  double rank = -kInf;
  for (size_t g = 0; g < lse.size(); ++g) rank = std::max(rank, part.Score(g, i) - lse[g]);
  return static_cast<float>(rank);
}

// A rank that `count` keys are likely to reach, and not many more.
float LikelyFloor(std::span<const CodeScores> parts, std::span<const double> lse, size_t n,
                  size_t count, std::vector<float>& sample) {
  const size_t stride = std::max(kLeastStride, n / kSampledKeys);
  sample.clear();
  for (const CodeScores& part : parts) {
    for (size_t i = 0; i < part.n; i += stride) sample.push_back(RankOf(part, lse, i));
  }
  // Where the last of them should be in the sample, and four deviations of that number further.
  const double expected = double(count) / double(n) * double(sample.size());
  const auto at = static_cast<size_t>(expected + 4 * std::sqrt(expected + 1)) + 1;
  if (at >= sample.size()) return -kInf;
  std::nth_element(sample.begin(), sample.begin() + ptrdiff_t(at), sample.end(), std::greater<>());
  return sample[at];
}

// The integer that head g's values of keys that reach `floor` lie above; one step of rounding low.
int16_t ValueBelow(const CodeScores& part, size_t g, double lse, float floor) {
  constexpr int16_t kAll = std::numeric_limits<int16_t>::min();
  constexpr int16_t kNone = std::numeric_limits<int16_t>::max();
  double score = floor + lse;
  if (part.softcap > 0) {
    if (score >= part.softcap) return kNone;
    if (score <= -part.softcap) return kAll;
    score = part.softcap * std::atanh(score / part.softcap);
  }
  const double mul = part.queries->mul[g], over = score - part.queries->add[g];
  if (!(mul > 0)) return over <= 0 ? kAll : kNone;
  return static_cast<int16_t>(std::clamp<double>(std::ceil(over / mul) - 2, kAll, kNone));
}

}  // namespace

void ShortList(std::span<const CodeScores> parts, const HeadMasses& masses, uint32_t count,
               SearchScratch& scratch) {
  const std::vector<double> lse = masses.LogSumExp();
  size_t n = 0;
  for (const CodeScores& part : parts) n += part.n;
  auto& found = scratch.found;
  auto& ranks = scratch.ranks;
  if (found.size() < n) found.resize(n);
  float floor = LikelyFloor(parts, lse, n, count, ranks);
  size_t n_found = 0;
  std::vector<int16_t> below(lse.size());
  for (;;) {
    n_found = 0;
    ranks.clear();
    for (const CodeScores& part : parts) {
      for (size_t g = 0; g < lse.size(); ++g) below[g] = ValueBelow(part, g, lse[g], floor);
      const size_t more = CodeScan().above(part.values, part.ld, lse.size(), below.data(), part.n,
                                           part.first_token, found.data() + n_found);
      for (size_t j = n_found; j < n_found + more; ++j) {
        ranks.push_back(RankOf(part, lse, found[j] - part.first_token));
      }
      n_found += more;
    }
    if (n_found >= count) break;
    floor = -kInf;  // the sample misled
  }
  const float kth = KthLargest(ranks, count, scratch.scores);
  // Integers are often equal: of those at the end the first ones, as far as there is room.
  size_t room = count;
  for (const float rank : ranks) room -= rank > kth;
  scratch.ids.clear();
  for (size_t j = 0; j < n_found; ++j) {
    const bool tie = ranks[j] == kth;
    if (ranks[j] < kth || (tie && room == 0)) continue;
    room -= tie;
    scratch.ids.push_back(found[j]);
  }
}

}  // namespace prefixd::index
