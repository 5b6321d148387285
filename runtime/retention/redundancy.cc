#include "runtime/retention/redundancy.h"

#include <algorithm>
#include <cmath>
#include <random>

#include "attention/step/step.h"

namespace prefixd {
namespace {

constexpr uint32_t kBlock = 8;  // keys that are compared with all others in one pass

// Reads a key; returns 1 over its length.
float OverLength(const RowsView& rows, size_t i, std::span<float> key) {
  ToFloat(rows.shape.dtype, rows.key(i), key);
  double squares = 0;
  for (const float x : key) squares += double{x} * x;
  return static_cast<float>(1 / (std::sqrt(squares) + 1e-8));
}

// Returns the tokens that all others are compared with, ascending: all, or one of each stretch.
// Texts repeat themselves at equal distances (tables, records), so that equal steps would meet some
// columns alone; drawn without a seed, since the same prompt keeps the same rows.
std::vector<uint32_t> Met(uint32_t n) {
  const uint32_t count = std::min(n, kCompared);
  std::vector<uint32_t> met(count);
  std::mt19937_64 rng(n);
  for (uint64_t i = 0; i < count; ++i) {
    const auto begin = static_cast<uint32_t>(i * n / count);
    const auto end = static_cast<uint32_t>((i + 1) * n / count);
    met[i] = begin + static_cast<uint32_t>(rng() % (end - begin));
  }
  return met;
}

double Counted(double cosine) { return cosine > kAlike ? cosine : 0; }

}  // namespace

std::vector<double> Redundancy(const RowsView& rows, TokenRange region) {
  const uint32_t dim = rows.shape.key_dim;
  const size_t n = rows.count;
  std::vector<double> mean(region.size());
  if (mean.empty()) return mean;
  const std::vector<uint32_t> tokens = Met(static_cast<uint32_t>(n));
  std::vector<RowRef> refs;
  for (const uint32_t t : tokens) refs.push_back({rows.key(t), rows.value(t)});
  const RowsView met = ScatteredRows(refs, rows.shape);
  std::vector<float> key(dim), over_norm(met.count);
  for (size_t i = 0; i < met.count; ++i) over_norm[i] = OverLength(met, i, key);
  const auto older = static_cast<uint32_t>(
      std::clamp<size_t>(n - std::min<size_t>(n, kRedundantNewest), region.begin, region.end));
  std::vector<float> block(size_t{kBlock} * dim), scores(kBlock * met.count);
  for (uint32_t begin = region.begin; begin < older; begin += kBlock) {
    const uint32_t count = std::min(kBlock, older - begin);
    double own[kBlock] = {};  // cosines of keys with themselves: 1, or 0 of a key without length
    for (uint32_t i = 0; i < count; ++i) {
      const auto unit = std::span(block).subspan(size_t{i} * dim, dim);
      const float over = OverLength(rows, begin + i, unit);
      for (float& x : unit) x *= over, own[i] += double{x} * x;
    }
    Scores(std::span(block).first(size_t{count} * dim), count, {.scale = 1}, met,
           std::span(scores).first(count * met.count));
    for (uint32_t i = 0; i < count; ++i) {
      const uint32_t token = begin + i;
      double sum = 0;
      for (size_t m = 0; m < met.count; ++m) {
        if (tokens[m] != token) sum += Counted(double{scores[i * met.count + m]} * over_norm[m]);
      }
      // Those that were met stand for all others.
      const double others = double(met.count) - std::ranges::binary_search(tokens, token);
      const double all = others > 0 ? sum / others * double(n - 1) : 0;
      mean[token - region.begin] = (all + Counted(own[i])) / double(n);
    }
  }
  const double most = *std::ranges::max_element(mean);
  for (double& m : mean) m = std::exp(m - most);
  return mean;
}

uint64_t RedundancyBytes(TokenRange region, const RowShape& shape) {
  return (kBlock + 1) * (uint64_t{kCompared} + shape.key_dim) * sizeof(float) +
         kCompared * (sizeof(RowRef) + sizeof(uint32_t)) + region.size() * sizeof(double);
}

void TakeOffRedundancy(std::span<const double> redundancy, std::span<double> scores) {
  for (size_t i = 0; i < scores.size(); ++i) {
    scores[i] = kGlobalWeight * scores[i] - (1 - kGlobalWeight) * redundancy[i];
  }
}

}  // namespace prefixd
