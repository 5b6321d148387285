#include "index/block_choice.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "attention/code_scan.h"
#include "attention/top_ranks.h"

namespace prefixd::index {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
// The best of a block's keys is likely no further than so many deviations above their mean.
constexpr float kReach = 2.5f;
// A block of 32 keys has no tail to speak of: its mean weight exceeds that of the mean score by no
// more than so many deviations.
constexpr float kMostTail = 2.0f;

// Keys of each block of the part's windows that are used: [blocks].
void CountUsed(const CodePart& part, std::vector<uint16_t>& counts) {
  const size_t first = part.first_block(), end = part.end_block();
  counts.assign(end - first, kCodeBlockKeys);
  const uint32_t from = part.used.begin - part.first_token, to = part.used.end - part.first_token;
  for (size_t b = first; b < end; ++b) {
    const size_t key = b / kWindowBlocks * kWindowKeys;
    if (key >= from && key + kWindowKeys <= to) continue;
    uint16_t n = 0;
    for (size_t place = b * kCodeBlockKeys; place < (b + 1) * kCodeBlockKeys; ++place) {
      n = static_cast<uint16_t>(n + part.uses(place));
    }
    counts[b - first] = n;
  }
}

float Capped(float score, float softcap) {
  return softcap > 0 ? softcap * std::tanh(score / softcap) : score;
}

}  // namespace

size_t CodePart::end_block() const {
  return std::min(end_window() * kWindowBlocks, codes.layout.n_blocks);
}

bool CodePart::uses(size_t place) const {
  if (codes.tokens[place] == kNoKey) return false;
  const uint32_t token = first_token + codes.key(place);
  return token >= used.begin && token < used.end;
}

void ChooseBlocks(const SearchRequest& request, std::span<const CodePart> parts, double fraction,
                  size_t at_least, std::span<BlockChoice> choices, HeadMasses& masses,
                  SearchScratch& scratch) {
  const uint32_t heads = request.group;
  const float cap = request.layer.softcap;
  // [heads][all blocks]: the mass that each is taken for, and the largest score that is likely.
  std::vector<uint16_t> counts, of_part;
  size_t all = 0;
  for (const CodePart& part : parts) all += part.end_block() - part.first_block();
  std::vector<float>& masses_of = scratch.block_masses;
  std::vector<float>& reach = scratch.ranks;
  masses_of.resize(heads * all);
  reach.resize(std::max(reach.size(), heads * all));
  std::vector<int16_t>& means = scratch.block_means;
  means.resize(heads * (all + parts.size() * kCodeBlockKeys));
  size_t at = 0, at_means = 0;
  for (size_t p = 0; p < parts.size(); ++p) {
    const CodePart& part = parts[p];
    CountUsed(part, of_part);
    const size_t windows = part.end_window() - part.first_window();
    const size_t ld = windows * kCodeBlockKeys, n = of_part.size();
    const CodeQueries& q = choices[p].queries.means;
    int16_t* values = means.data() + at_means;
    CodeScan().scan(
        part.codes.means + part.first_window() * CodeBlockBytes(part.book->keys.key_dim), nullptr,
        windows, {q.weights.data(), q.bias.data(), heads, q.fields}, values, ld);
    const uint16_t* spreads = part.codes.spreads + part.first_block();
    for (uint32_t g = 0; g < heads; ++g) {
      const float mul = q.mul[g], add = q.add[g], unit = choices[p].queries.spread[g];
      float* mass = masses_of.data() + g * all + at;
      float* high = reach.data() + g * all + at;
      for (size_t b = 0; b < n; ++b) {
        const float mean = mul * float(values[g * ld + b]) + add;
        const float sd = unit * Bf16ToFloat(spreads[b]);
        mass[b] = mean + std::min(sd * sd / 2, kMostTail * sd);
        high[b] = mean + kReach * sd;
      }
      if (cap > 0) {
        for (size_t b = 0; b < n; ++b) {
          mass[b] = Capped(mass[b], cap), high[b] = Capped(high[b], cap);
        }
      }
    }
    counts.insert(counts.end(), of_part.begin(), of_part.end());
    at += n;
    at_means += heads * ld;
  }
  const float full = std::log(float(kCodeBlockKeys));
  std::vector<float> log_count(kCodeBlockKeys + 1, -kInf);
  for (size_t c = 1; c < log_count.size(); ++c) log_count[c] = std::log(float(c));
  HeadMasses whole(heads);
  for (uint32_t g = 0; g < heads; ++g) {
    float* mass = masses_of.data() + g * all;
    for (size_t b = 0; b < all; ++b) {
      mass[b] += counts[b] == kCodeBlockKeys ? full : log_count[counts[b]];
    }
    whole.AddScores(g, {mass, all});
  }
  const std::vector<double> lse = whole.LogSumExp();
  std::vector<float>& rank = scratch.block_ranks;
  rank.assign(all, -kInf);
  for (uint32_t g = 0; g < heads; ++g) {
    const float* high = reach.data() + g * all;
    const auto shift = static_cast<float>(lse[g]);
    for (size_t b = 0; b < all; ++b) rank[b] = std::max(rank[b], high[b] - shift);
  }
  size_t useful = 0;
  for (size_t b = 0; b < all; ++b) {
    if (counts[b] == 0) rank[b] = -kInf;
    useful += counts[b] > 0;
  }
  auto wanted = static_cast<size_t>(std::ceil(fraction * double(useful)));
  float least = -kInf;
  for (;; wanted *= 2) {
    wanted = std::clamp<size_t>(wanted, 1, useful);
    least = wanted < useful ? KthLargest(rank, wanted, scratch.scores) : -kInf;
    size_t keys = 0;
    for (size_t b = 0; b < all; ++b) keys += rank[b] >= least ? counts[b] : 0;
    if (keys >= at_least || wanted == useful) break;
  }
  at = at_means = 0;
  for (size_t p = 0; p < parts.size(); ++p) {
    const CodePart& part = parts[p];
    BlockChoice& choice = choices[p];
    const size_t first = part.first_block(), n = part.end_block() - first;
    const size_t ld = (part.end_window() - part.first_window()) * kCodeBlockKeys;
    for (size_t b = 0; b < n; ++b) {
      if (counts[at + b] == 0 || rank[at + b] < least) continue;
      choice.chosen.push_back(static_cast<uint32_t>(first + b));
      choice.some.push_back(counts[at + b]);
      for (uint32_t g = 0; g < heads; ++g) {
        masses_of[g * all + at + b] = -kInf;
        choice.bias.push_back(choice.queries.keys.bias[g] +
                              choice.queries.BlockBias(g, means[at_means + g * ld + b]));
      }
    }
    at += n;
    at_means += heads * ld;
  }
  for (uint32_t g = 0; g < heads; ++g) {
    masses.AddScores(g, std::span<const float>(masses_of).subspan(g * all, all));
  }
}

}  // namespace prefixd::index
