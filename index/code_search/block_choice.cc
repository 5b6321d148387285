#include "index/code_search/block_choice.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "index/codes/code_scan.h"
#include "index/ranking/top_ranks.h"

namespace prefixd::index {
namespace {

constexpr float kInfScore = std::numeric_limits<float>::infinity();
constexpr float kLarge = std::numeric_limits<float>::max();

// Keys of each block of the part's windows that are used: into counts [blocks]; and into `partial`
// the blocks of which not all are.
void CountUsed(const CodePart& part, std::span<uint16_t> counts, std::vector<uint32_t>& partial) {
  const size_t first = part.first_block(), end = part.end_block();
  std::fill(counts.begin(), counts.end(), uint16_t{kCodeBlockKeys});
  const uint32_t from = part.used.begin - part.first_token, to = part.used.end - part.first_token;
  for (size_t b = first; b < end; ++b) {
    const size_t key = b / kWindowBlocks * kWindowKeys;
    if (key >= from && key + kWindowKeys <= to) continue;
    uint16_t n = 0;
    for (size_t place = b * kCodeBlockKeys; place < (b + 1) * kCodeBlockKeys; ++place) {
      n = static_cast<uint16_t>(n + part.uses(place));
    }
    counts[b - first] = n;
    if (n != kCodeBlockKeys) partial.push_back(static_cast<uint32_t>(b - first));
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
  const bool every = fraction >= 1;  // nothing is weighed: each block is scanned
  const CodeScanTable& kernels = CodeScan();
  size_t all = 0;
  for (const CodePart& part : parts) all += part.end_block() - part.first_block();
  std::vector<uint16_t>& counts = scratch.block_counts;  // [all blocks]
  counts.resize(all);
  // [heads][all blocks]: the mass that each is taken for, and the largest score that is likely.
  std::vector<float>& masses_of = scratch.block_masses;
  std::vector<float>& high_of = scratch.scores;
  if (!every) masses_of.resize(heads * all);
  if (!every && high_of.size() < heads * all) high_of.resize(heads * all);
  const float full = std::log(float(kCodeBlockKeys));
  size_t at = 0;
  for (size_t p = 0; p < parts.size(); ++p) {
    const CodePart& part = parts[p];
    BlockChoice& choice = choices[p];
    const size_t n = part.end_block() - part.first_block();
    const auto some = std::span(counts).subspan(at, n);
    std::vector<uint32_t>& partial = scratch.listed;
    partial.clear();
    CountUsed(part, some, partial);
    const size_t windows = part.end_window() - part.first_window();
    choice.ld_bias = windows * kCodeBlockKeys;
    std::vector<int16_t>& means = scratch.block_means;
    means.resize(heads * choice.ld_bias);
    choice.bias.resize(heads * choice.ld_bias);
    const CodeQueries& q = choice.queries.means;
    kernels.scan(part.codes.means + part.first_window() * CodeBlockBytes(part.book->keys.key_dim),
                 nullptr, windows, {q.weights.data(), q.bias.data(), heads, q.fields}, means.data(),
                 choice.ld_bias);
    const uint16_t* spreads = part.codes.spreads + part.first_block();
    for (uint32_t g = 0; g < heads; ++g) {
      const int16_t* mean = means.data() + g * choice.ld_bias;
      kernels.scaled(mean, n, choice.queries.units_of_mean[g],
                     choice.bias.data() + g * choice.ld_bias);
      if (every) continue;
      float* mass = masses_of.data() + g * all + at;
      float* high = high_of.data() + g * all + at;
      kernels.block_scores(mean, spreads, n, {q.mul[g], q.add[g], choice.queries.spread[g]}, mass,
                           high);
      for (size_t b = 0; b < n && cap > 0; ++b) {
        mass[b] = Capped(mass[b], cap), high[b] = Capped(high[b], cap);
      }
      for (size_t b = 0; b < n; ++b) mass[b] += full;
      for (const uint32_t b : partial) mass[b] += std::log(float(some[b])) - full;
    }
    at += n;
    if (!every) continue;
    choice.chosen.clear();
    choice.some.clear();
    for (size_t b = 0; b < n; ++b) {
      if (some[b] == 0) continue;
      choice.chosen.push_back(static_cast<uint32_t>(b));
      choice.some.push_back(some[b]);
    }
  }
  if (every) return;
  HeadMasses whole(heads);
  for (uint32_t g = 0; g < heads; ++g) whole.AddScores(g, {masses_of.data() + g * all, all});
  const std::vector<double> lse = whole.LogSumExp();
  std::vector<float>& rank = scratch.block_ranks;
  rank.assign(all, -kInfScore);
  for (uint32_t g = 0; g < heads; ++g) {
    const float* high = high_of.data() + g * all;
    const auto shift = static_cast<float>(lse[g]);
    for (size_t b = 0; b < all; ++b) {
      const float normalised = high[b] - shift;
      rank[b] = normalised > rank[b] ? normalised : rank[b];
    }
  }
  size_t useful = all;
  for (size_t b = 0; b < all; ++b) {
    if (counts[b] != 0) continue;
    rank[b] = -kInfScore;
    --useful;
  }
  auto wanted = static_cast<size_t>(std::ceil(fraction * double(useful)));
  float least = -kInfScore;
  for (;; wanted *= 2) {
    wanted = std::clamp<size_t>(wanted, 1, useful);
    least = wanted < useful ? KthLargest(rank, wanted, scratch.ranks) : -kInfScore;
    size_t keys = 0;
    for (size_t b = 0; b < all; ++b) keys += rank[b] >= least ? counts[b] : 0;
    if (keys >= at_least || wanted == useful) break;
  }
  at = 0;
  for (size_t p = 0; p < parts.size(); ++p) {
    BlockChoice& choice = choices[p];
    const size_t n = parts[p].end_block() - parts[p].first_block();
    choice.chosen.resize(n);
    choice.chosen.resize(
        kernels.places_from(rank.data() + at, n, std::max(least, -kLarge), choice.chosen.data()));
    choice.some.clear();
    for (const uint32_t b : choice.chosen) choice.some.push_back(counts[at + b]);
    at += n;
  }
  // Of what is chosen every key is added when it is scanned.
  for (uint32_t g = 0; g < heads; ++g) {
    float* mass = masses_of.data() + g * all;
    for (size_t b = 0; b < all; ++b) mass[b] = rank[b] >= least ? -kInfScore : mass[b];
    masses.AddScores(g, {mass, all});
  }
}

}  // namespace prefixd::index
