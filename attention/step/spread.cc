#include "attention/step/spread.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <functional>

namespace prefixd {
namespace {

constexpr int kGrid = 32;          // steps of a head's share between its bounds
constexpr double kNoLoss = 1e-30;  // losses below count as this one

double Log(double loss) { return std::log(std::max(loss, kNoLoss)); }

// The loss at `tokens`, along the power law through the two points next to it.
double LossAt(std::span<const LossCurve::Point> points, double tokens) {
  if (points.size() == 1) return points.front().loss;
  const auto above = std::ranges::lower_bound(points.subspan(1, points.size() - 2), tokens, {},
                                              &LossCurve::Point::tokens);
  const LossCurve::Point& b = *above;
  const LossCurve::Point& a = *(above - 1);
  const double at = (std::log(tokens) - std::log(a.tokens)) / std::log(b.tokens / a.tokens);
  return std::exp(Log(a.loss) + at * (Log(b.loss) - Log(a.loss)));
}

// A stretch of a head's hull.
struct Stretch {
  double gain = 0;  // loss taken away by a token
  uint32_t head = 0, tokens = 0;
};

struct Bounds {
  uint32_t low = 0, high = 0;
};

Bounds BoundsOf(const LossCurve& head) {
  if (head.points.size() < 2 || head.equal == 0) return {head.equal, head.equal};
  const auto first = static_cast<uint32_t>(std::ceil(head.points.front().tokens));
  const auto last = static_cast<uint32_t>(std::floor(head.points.back().tokens));
  const uint32_t low = std::max((head.equal + kMostSpread - 1) / kMostSpread, first);
  const uint32_t high = std::min(head.equal * kMostSpread, last);
  return {std::min(low, head.equal), std::max(high, head.equal)};
}

// Adds the stretches of the lower convex hull of the head's curve, which gain ever less.
void AddHull(const LossCurve& head, uint32_t number, Bounds bounds, std::vector<Stretch>& out) {
  std::vector<LossCurve::Point> hull;
  double last = 0;
  for (int i = 0; i <= kGrid; ++i) {
    const double tokens =
        std::round(bounds.low * std::pow(double(bounds.high) / bounds.low, double(i) / kGrid));
    if (tokens == last) continue;
    last = tokens;
    const LossCurve::Point point{tokens, LossAt(head.points, tokens)};
    const auto slope = [](const LossCurve::Point& a, const LossCurve::Point& b) {
      return (b.loss - a.loss) / (b.tokens - a.tokens);
    };
    while (hull.size() > 1 &&
           slope(hull[hull.size() - 2], hull.back()) >= slope(hull.back(), point)) {
      hull.pop_back();
    }
    hull.push_back(point);
  }
  for (size_t i = 1; i < hull.size(); ++i) {
    const double tokens = hull[i].tokens - hull[i - 1].tokens;
    out.push_back(
        {(hull[i - 1].loss - hull[i].loss) / tokens, number, static_cast<uint32_t>(tokens)});
  }
}

}  // namespace

std::vector<uint32_t> SpreadTokens(std::span<const LossCurve> heads) {
  std::vector<uint32_t> tokens;
  std::vector<Stretch> stretches;
  std::vector<Bounds> bounds;
  uint64_t left = 0;
  for (uint32_t h = 0; h < heads.size(); ++h) {
    bounds.push_back(BoundsOf(heads[h]));
    tokens.push_back(bounds[h].low);
    left += heads[h].equal - bounds[h].low;
    if (bounds[h].low < bounds[h].high) AddHull(heads[h], h, bounds[h], stretches);
  }
  // Of equal gain the earlier head, and of a head the earlier stretch, comes first.
  std::ranges::stable_sort(stretches, std::greater(), &Stretch::gain);
  for (const Stretch& stretch : stretches) {
    if (left == 0 || !(stretch.gain > 0)) break;
    const auto some = static_cast<uint32_t>(std::min<uint64_t>(stretch.tokens, left));
    tokens[stretch.head] += some;
    left -= some;
  }
  // What nobody gains by is shared.
  for (bool any = true; left > 0 && any;) {
    any = false;
    for (size_t h = 0; h < tokens.size() && left > 0; ++h) {
      if (tokens[h] >= bounds[h].high) continue;
      ++tokens[h];
      --left;
      any = true;
    }
  }
  return tokens;
}

}  // namespace prefixd
