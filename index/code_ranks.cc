#include "index/code_ranks.h"

#include <algorithm>
#include <bit>
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

void HeadMasses::Add(const CodeScores& part, size_t begin, size_t n, size_t none) {
  if (none == n) return;
  for (size_t g = 0; g < shift_.size(); ++g) {
    const int16_t* v = part.values + g * part.ld + begin;
    const double top = part.OfValue(g, CodeScan().largest(v, n));
    if (top > shift_[g]) {
      sum_[g] *= std::exp(shift_[g] - top);
      shift_[g] = top;
    }
    if (part.softcap > 0) {
      for (size_t i = begin; i < begin + n; ++i) {
        if (part.values[g * part.ld + i] == kNoScore) continue;
        sum_[g] += std::exp(part.Score(g, i) - shift_[g]);
      }
      continue;
    }
    const float mul = part.queries->mul[g];
    const auto shift = static_cast<float>(part.queries->add[g] - shift_[g]);
    double sum = CodeScan().exp_sum(v, n, mul, shift);
    if (none > 0) sum -= double(none) * CodeScan().exp_sum(&kNoScore, 1, mul, shift);
    sum_[g] += std::max(0.0, sum);
  }
}

void HeadMasses::AddScores(size_t head, std::span<const float> scores) {
  if (scores.empty()) return;
  constexpr size_t kLanes = 16;  // vectorised by compilers
  float most[kLanes];
  std::fill_n(most, kLanes, -kInf);
  for (size_t i = 0; i < scores.size(); i += kLanes) {
    const size_t some = std::min(kLanes, scores.size() - i);
    for (size_t l = 0; l < some; ++l) most[l] = scores[i + l] > most[l] ? scores[i + l] : most[l];
  }
  const double top = *std::max_element(most, most + kLanes);
  if (top == -kInf) return;
  if (top > shift_[head]) {
    sum_[head] *= std::exp(shift_[head] - top);
    shift_[head] = top;
  }
  sum_[head] +=
      CodeScan().exp_total(scores.data(), scores.size(), static_cast<float>(-shift_[head]));
}

void HeadMasses::Correct(std::span<const CodeScores> parts, const ListedPlaces& listed,
                         std::span<const float> exact, size_t ld) {
  std::vector<int16_t> values;
  for (size_t g = 0; g < sum_.size(); ++g) {
    // By codes: part for part, for each has its own units.
    double by_codes = 0;
    size_t at = 0;
    for (size_t p = 0; p < parts.size(); ++p) {
      const CodeScores& part = parts[p];
      values.clear();
      double capped = 0;
      for (; at < listed.ends[p]; ++at) {
        const size_t i = listed.places[at];
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
constexpr size_t kSampledKeys = 2048, kLeastStride = 16;

// max_g score - lse, the scores raised by margins if there are any.
float RankOf(const CodeScores& part, std::span<const double> lse, std::span<const float> margin,
             size_t i) {
  float rank = -kInf;
  for (size_t g = 0; g < lse.size(); ++g) {
    const double raise = margin.empty() ? 0 : margin[g];
    const double score =
        part.softcap > 0
            ? part.Score(g, i)
            : double{part.queries->mul[g]} * part.values[g * part.ld + i] + part.queries->add[g];
    rank = std::max(rank, static_cast<float>(score + raise - lse[g]));
  }
  return rank;
}

// A rank that `count` keys are likely to reach, and not many more.
float LikelyFloor(std::span<const CodeScores> parts, std::span<const double> lse, size_t n,
                  size_t count, std::vector<float>& sample) {
  const size_t stride = std::max(kLeastStride, n / kSampledKeys);
  sample.clear();
  for (const CodeScores& part : parts) {
    for (size_t i = 0; i < part.n; i += stride) sample.push_back(RankOf(part, lse, {}, i));
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

namespace {

// Places of all keys that reach `floor`, with their margins if `raised`; into scratch.found, and
// their ranks, so taken, into scratch.ranks. Perhaps a few more. Returns where each part's end.
std::vector<size_t> Reaching(std::span<const CodeScores> parts, std::span<const double> lse,
                             float floor, bool raised, SearchScratch& scratch) {
  size_t n_found = 0;
  std::vector<int16_t> below(lse.size());
  std::vector<size_t> ends;
  scratch.ranks.clear();
  for (const CodeScores& part : parts) {
    for (size_t g = 0; g < lse.size(); ++g) {
      below[g] = ValueBelow(part, g, lse[g], raised ? floor - part.margin[g] : floor);
    }
    const auto margin = raised ? part.margin : std::span<const float>();
    uint32_t* found = scratch.found.data() + n_found;
    const size_t more =
        CodeScan().above(part.values, part.ld, lse.size(), below.data(), part.n, 0, found);
    for (size_t j = 0; j < more; ++j) {
      scratch.ranks.push_back(RankOf(part, lse, margin, found[j]));
    }
    n_found += more;
    ends.push_back(n_found);
  }
  return ends;
}

}  // namespace

ListedPlaces ShortList(std::span<const CodeScores> parts, const HeadMasses& masses, uint32_t k,
                       uint32_t most, TokenRange range, SearchScratch& scratch) {
  const std::vector<double> lse = masses.LogSumExp();
  size_t n = 0;
  for (const CodeScores& part : parts) n += part.n;
  auto& found = scratch.found;
  auto& ranks = scratch.ranks;
  if (found.size() < n) found.resize(n);
  const float floor = LikelyFloor(parts, lse, n, k + 1, ranks);
  std::vector<size_t> ends = Reaching(parts, lse, floor, false, scratch);
  if (ends.back() <= k) ends = Reaching(parts, lse, -kInf, false, scratch);  // the sample misled
  ends = Reaching(parts, lse, KthLargest(ranks, k + 1, scratch.scores), true, scratch);
  const size_t count = std::min<size_t>(most, ranks.size());
  const float last = count < ranks.size() ? KthLargest(ranks, count, scratch.scores) : -kInf;
  // Integers are often equal: of those at the end the first ones, as far as there is room.
  size_t room = count;
  for (const float rank : ranks) room -= rank > last;
  // Tokens ascend within a part's windows only: they are marked, and read off in order.
  auto& marks = scratch.marks;
  marks.assign((size_t{range.size()} + 63) / 64, 0);
  size_t kept = 0;
  for (size_t p = 0, j = 0; p < parts.size(); ++p) {
    for (; j < ends[p]; ++j) {
      const bool tie = ranks[j] == last;
      if (ranks[j] < last || (tie && room == 0)) continue;
      room -= tie;
      const uint32_t token = parts[p].Token(found[j]) - range.begin;
      marks[token / 64] |= uint64_t{1} << token % 64;
      found[kept++] = found[j];
    }
    ends[p] = kept;
  }
  scratch.ids.clear();
  for (size_t w = 0; w < marks.size(); ++w) {
    for (uint64_t bits = marks[w]; bits != 0; bits &= bits - 1) {
      scratch.ids.push_back(range.begin + static_cast<uint32_t>(w * 64) +
                            static_cast<uint32_t>(std::countr_zero(bits)));
    }
  }
  return {std::span<const uint32_t>(found).first(kept), std::move(ends)};
}

}  // namespace prefixd::index
