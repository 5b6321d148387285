#include "attention/estimators/outweighing.h"

#include <algorithm>
#include <array>
#include <cassert>
#include <cmath>
#include <limits>
#include <numeric>

namespace prefixd {
namespace {

constexpr double kNone = -std::numeric_limits<double>::infinity();

double LogAdd(double a, double b) {
  const double most = std::max(a, b);
  return most == kNone ? kNone : most + std::log1p(std::exp(std::min(a, b) - most));
}

// The largest features of a set of rows, and one more.
struct Largest {
  std::array<float, kMostApart + 1> value;
  std::array<uint32_t, kMostApart + 1> row;
  size_t n = 0;

  void Offer(float x, uint32_t i) {
    if (n == value.size() && !(x > value[n - 1])) return;
    if (n < value.size()) ++n;
    size_t at = n - 1;
    for (; at > 0 && x > value[at - 1]; --at) {
      value[at] = value[at - 1];
      row[at] = row[at - 1];
    }
    value[at] = x;
    row[at] = i;
  }
};

}  // namespace

void RaiseExcess(std::span<const float> log_weights, double log_rest, std::span<double> excess) {
  assert(log_weights.size() == excess.size());
  std::vector<size_t> order(log_weights.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::ranges::sort(order, [&](size_t a, size_t b) { return log_weights[a] < log_weights[b]; });
  // From the smallest on: what outweighs with a row are those above it.
  std::vector<double> above(order.size());
  double smaller = log_rest;
  for (size_t i = 0; i < order.size(); ++i) {
    const double own = log_weights[order[i]];
    above[i] = own == kNone ? kNone : own - smaller;
    smaller = LogAdd(smaller, own);
  }
  double most = kNone;
  for (size_t i = 0; i < order.size(); ++i) {
    most = std::max(most, above[i]);
    excess[order[i]] = std::max(excess[order[i]], most);
  }
}

std::vector<uint32_t> OutweighingRows(std::span<const float> log_phi, size_t n, uint32_t d_phi) {
  assert(log_phi.size() == n * d_phi);
  std::vector<uint32_t> rows;
  for (uint32_t f = 0; f < d_phi && n > 1; ++f) {
    Largest largest;
    for (size_t i = 0; i < n; ++i) largest.Offer(log_phi[i * d_phi + f], static_cast<uint32_t>(i));
    for (size_t c = std::min(kMostApart, largest.n - 1); c > 0; --c) {
      // The sum is at least its largest term.
      if (!(double{largest.value[c - 1]} - largest.value[c] > kOutweighs)) continue;
      double sum = 0;
      for (size_t i = 0; i < n; ++i) {
        const float x = log_phi[i * d_phi + f];
        if (std::find(largest.row.begin(), largest.row.begin() + c, i) == largest.row.begin() + c) {
          sum += std::exp(double{x} - largest.value[c]);
        }
      }
      // NaN where no other row has the feature: -inf less -inf.
      const double rest = largest.value[c] + std::log(sum);
      if (!std::isnan(rest) && !(largest.value[c - 1] - rest > kOutweighs)) continue;
      rows.insert(rows.end(), largest.row.begin(), largest.row.begin() + c);
      break;
    }
  }
  std::ranges::sort(rows);
  rows.erase(std::unique(rows.begin(), rows.end()), rows.end());
  return rows;
}

}  // namespace prefixd
