#include "index/code_search/code_ranks.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>

#include "index/codes/code_scan.h"
#include "index/ranking/top_ranks.h"

namespace prefixd::index {
namespace {

constexpr float kInfRank = std::numeric_limits<float>::infinity();

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

HeadMasses::HeadMasses(size_t heads) : shift_(heads, -kInfRank), sum_(heads, 0.0) {}

void HeadMasses::Add(const CodeScores& part, size_t begin, size_t n, size_t none) {
  if (none == n) return;
  for (size_t g = 0; g < shift_.size(); ++g) {
    const int16_t* v = part.values + g * part.ld + begin;
    const int16_t largest = CodeScan().largest(v, n);
    const double top = part.OfValue(g, largest);
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
    double sum = CodeScan().weight_sum(v, n, largest, mul);
    if (none > 0) sum -= double(none) * CodeScan().weight_sum(&kNoScore, 1, largest, mul);
    sum_[g] += std::exp(top - shift_[g]) * std::max(0.0, sum);
  }
}

void HeadMasses::Correct(std::span<const CodeScores> parts, std::span<const ListedPart> listed,
                         std::span<const float> exact, size_t ld) {
  for (size_t g = 0; g < sum_.size(); ++g) {
    // By codes: part for part, for each has its own units.
    double by_codes = 0;
    for (size_t p = 0; p < parts.size(); ++p) {
      const CodeScores& part = parts[p];
      const int16_t* values = listed[p].values + g * listed[p].ld;
      if (part.softcap > 0) {
        for (size_t i = 0; i < listed[p].n; ++i) {
          by_codes += std::exp(part.OfValue(g, values[i]) - shift_[g]);
        }
      } else if (listed[p].n > 0) {
        const int16_t largest = CodeScan().largest(values, listed[p].n);
        by_codes += std::exp(part.OfValue(g, largest) - shift_[g]) *
                    CodeScan().weight_sum(values, listed[p].n, largest, part.queries->mul[g]);
      }
    }
    const float* row = exact.data() + g * ld;
    const double shift = std::max(shift_[g], double{CodeScan().largest_float(row, ld)});
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

// Of `n` keys with scores `values` [heads][n] the ranks max_g score - lse, the scores raised by
// margins if there are any: into ranks [n].
void Ranks(const CodeScores& part, std::span<const double> lse, std::span<const float> margin,
           const int16_t* values, size_t n, float* ranks) {
  std::fill_n(ranks, n, -kInfRank);
  for (size_t g = 0; g < lse.size(); ++g) {
    const int16_t* v = values + g * n;
    const double raise = (margin.empty() ? 0 : double{margin[g]}) - lse[g];
    if (part.softcap > 0) {
      for (size_t i = 0; i < n; ++i) {
        ranks[i] = std::max(ranks[i], static_cast<float>(part.OfValue(g, v[i]) + raise));
      }
    } else {
      CodeScan().raise(v, n, part.queries->mul[g], static_cast<float>(part.queries->add[g] + raise),
                       ranks);
    }
  }
}

// The scores of `places` into values [heads][n].
void Pick(const CodeScores& part, size_t heads, std::span<const uint32_t> places, int16_t* values) {
  for (size_t g = 0; g < heads; ++g) {
    CodeScan().pick(part.values + g * part.ld, places.data(), places.size(),
                    values + g * places.size());
  }
}

// Ranks of a sample of all keys, into scratch.sampled.
void SampleRanks(std::span<const CodeScores> parts, std::span<const double> lse, size_t n,
                 SearchScratch& scratch) {
  const size_t stride = std::max(kLeastStride, n / kSampledKeys);
  std::vector<float>& sample = scratch.sampled;
  sample.clear();
  for (const CodeScores& part : parts) {
    size_t some = 0;
    for (size_t i = 0; i < part.n; i += stride) {
      scratch.found[some++] = static_cast<uint32_t>(i);
    }
    scratch.picked.resize(std::max(scratch.picked.size(), lse.size() * some));
    sample.resize(sample.size() + some);
    Pick(part, lse.size(), std::span(scratch.found).first(some), scratch.picked.data());
    Ranks(part, lse, {}, scratch.picked.data(), some, sample.data() + sample.size() - some);
  }
}

// A rank that `count` of n keys are likely to reach, and not many more: that of the sample's key
// where the last of them should be, and so many deviations of that number further.
float LikelyFloor(std::span<const float> sample, size_t n, size_t count, double deviations,
                  std::vector<float>& buffer) {
  const double expected = double(count) / double(n) * double(sample.size());
  const auto at = static_cast<size_t>(expected + deviations * std::sqrt(expected + 1)) + 1;
  return at < sample.size() ? KthLargest(sample, at + 1, buffer) : -kInfRank;
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

// Keys that reach `floor` with their margins, and perhaps a few more: their places into
// scratch.found, part for part, their scores into scratch.picked, each part's [heads][n], their
// ranks into scratch.ranks and, with margins, scratch.raised. Returns how many of each part.
std::vector<size_t> Reaching(std::span<const CodeScores> parts, std::span<const double> lse,
                             float floor, SearchScratch& scratch) {
  size_t all = 0;
  std::vector<int16_t> below(lse.size());
  std::vector<size_t> counts;
  for (const CodeScores& part : parts) {
    for (size_t g = 0; g < lse.size(); ++g) {
      below[g] = ValueBelow(part, g, lse[g], floor - part.margin[g]);
    }
    uint32_t* found = scratch.found.data() + all;
    const size_t n =
        CodeScan().above(part.values, part.ld, lse.size(), below.data(), part.n, 0, found);
    for (auto* buffer : {&scratch.ranks, &scratch.raised}) {
      if (buffer->size() < all + n) buffer->resize(all + n);
    }
    if (scratch.picked.size() < lse.size() * (all + n)) {
      scratch.picked.resize(lse.size() * (all + n));
    }
    int16_t* values = scratch.picked.data() + lse.size() * all;
    Pick(part, lse.size(), {found, n}, values);
    Ranks(part, lse, {}, values, n, scratch.ranks.data() + all);
    Ranks(part, lse, part.margin, values, n, scratch.raised.data() + all);
    counts.push_back(n);
    all += n;
  }
  return counts;
}

}  // namespace

std::vector<ListedPart> ShortList(std::span<const CodeScores> parts, const HeadMasses& masses,
                                  uint32_t k, uint32_t most, TokenRange range,
                                  SearchScratch& scratch) {
  const std::vector<double> lse = masses.LogSumExp();
  size_t n = 0;
  for (const CodeScores& part : parts) n += part.n;
  if (scratch.found.size() < n) scratch.found.resize(n);
  SampleRanks(parts, lse, n, scratch);
  std::vector<size_t> counts;
  size_t n_found = 0;
  std::span<const float> ranks, raised;
  // A sample can mislead.
  for (double deviations = 3;; deviations *= 4) {
    const float floor = LikelyFloor(scratch.sampled, n, k + 1, deviations, scratch.scores);
    counts = Reaching(parts, lse, floor, scratch);
    n_found = std::accumulate(counts.begin(), counts.end(), size_t{0});
    ranks = std::span<const float>(scratch.ranks).first(n_found);
    raised = std::span<const float>(scratch.raised).first(n_found);
    if (floor == -kInfRank || CodeScan().count_from(ranks.data(), n_found, floor) > k) break;
  }
  float last = KthLargest(ranks, k + 1, scratch.scores);
  size_t surplus = 0;  // of those that reach it
  if (CodeScan().count_from(raised.data(), raised.size(), last) > most) {
    last = KthLargest(raised, most, scratch.scores);
    surplus = CodeScan().count_from(raised.data(), raised.size(), last) - most;
  }
  // Tokens ascend within a part's windows only: they are marked, and read off in order.
  auto& marks = scratch.marks;
  marks.assign((size_t{range.size()} + 63) / 64, 0);
  std::vector<ListedPart> listed(parts.size());
  auto& kept = scratch.listed;  // of a part, counted among those found
  size_t begin = n_found;
  for (size_t p = parts.size(); p-- > 0;) {
    begin -= counts[p];
    const float* rank = raised.data() + begin;
    kept.resize(counts[p]);
    kept.resize(CodeScan().places_from(rank, counts[p], last, kept.data()));
    if (surplus > 0) {
      // Integers are often equal: of those at the end the last ones go.
      size_t ties = 0;
      for (const uint32_t j : kept) ties += rank[j] == last;
      const size_t going = std::min(ties, surplus);
      surplus -= going;
      size_t staying = ties - going;
      std::erase_if(kept, [&](uint32_t j) {
        if (rank[j] != last) return false;
        const bool goes = staying == 0;
        staying -= !goes;
        return goes;
      });
    }
    const uint32_t* found = scratch.found.data() + begin;
    constexpr size_t kPrefetch = 32;  // keys whose tokens are on their way: each is in another line
    for (size_t j = 0; j < kept.size(); ++j) {
      if (j + kPrefetch < kept.size()) parts[p].PrefetchToken(found[kept[j + kPrefetch]]);
      const uint32_t token = parts[p].Token(found[kept[j]]) - range.begin;
      marks[token / 64] |= uint64_t{1} << token % 64;
    }
    int16_t* values = scratch.picked.data() + lse.size() * begin;
    for (size_t g = 0; g < lse.size(); ++g) {
      int16_t* of_head = values + g * counts[p];
      for (size_t j = 0; j < kept.size(); ++j) of_head[j] = of_head[kept[j]];
    }
    listed[p] = {values, counts[p], kept.size()};
  }
  size_t n_listed = 0;
  for (const ListedPart& part : listed) n_listed += part.n;
  scratch.ids.resize(n_listed);
  uint32_t* next = scratch.ids.data();
  for (size_t w = 0; w < marks.size(); ++w) {
    for (uint64_t bits = marks[w]; bits != 0; bits &= bits - 1) {
      *next++ = range.begin + static_cast<uint32_t>(w * 64) +
                static_cast<uint32_t>(std::countr_zero(bits));
    }
  }
  scratch.ids.resize(static_cast<size_t>(next - scratch.ids.data()));
  return listed;
}

}  // namespace prefixd::index
