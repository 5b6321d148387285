#include "measure/page/axis.h"

#include <algorithm>
#include <cmath>

#include "measure/page/text.h"

namespace prefixd::bench {
namespace {

// Returns the steps of `per_decade` that just contain [low, high].
std::vector<double> LogTicks(double low, double high, const std::vector<double>& per_decade) {
  std::vector<double> all;
  const int from = static_cast<int>(std::floor(std::log10(low) - 1e-9));
  const int to = static_cast<int>(std::ceil(std::log10(high) + 1e-9));
  for (int e = from; e <= to; ++e) {
    for (const double m : per_decade) all.push_back(m * std::pow(10.0, e));
  }
  constexpr double kNear = 1e-6;
  std::vector<double> out;
  for (size_t i = 0; i < all.size(); ++i) {
    const bool too_low = i + 1 < all.size() && all[i + 1] <= low * (1 + kNear);
    const bool too_high = i > 0 && all[i - 1] >= high * (1 - kNear);
    if (!too_low && !too_high) out.push_back(all[i]);
  }
  return out;
}

Scale LogScale(const Axis& axis, int max_ticks) {
  Scale scale;
  scale.logarithmic = true;
  const double low = std::max(axis.low, 1e-12), high = std::max(axis.high, low * 1.0001);
  std::vector<double> ticks = LogTicks(low, high, {1, 2, 5});
  if (static_cast<int>(ticks.size()) > max_ticks) ticks = LogTicks(low, high, {1});
  while (static_cast<int>(ticks.size()) > max_ticks && ticks.size() > 2) {
    // Every other decade; the range grows by one where its number is odd.
    if (ticks.size() % 2 == 0) ticks.push_back(ticks.back() * (ticks.back() / ticks.end()[-2]));
    std::vector<double> fewer;
    for (size_t i = 0; i < ticks.size(); i += 2) fewer.push_back(ticks[i]);
    ticks = std::move(fewer);
  }
  for (const double t : ticks) scale.ticks.emplace_back(t, Short(t));
  scale.low = ticks.front();
  scale.high = ticks.back();
  return scale;
}

Scale LinearScale(const Axis& axis, int max_ticks) {
  Scale scale;
  const double span = std::max(axis.high - axis.low, 1e-9);
  double step = std::pow(10.0, std::floor(std::log10(span)) - 1);
  for (int i = 0;; ++i) {
    static constexpr double kNext[] = {2, 2.5, 2};  // 1, 2, 5, 10
    const double low = std::floor(axis.low / step + 1e-9),
                 high = std::ceil(axis.high / step - 1e-9);
    if (high - low + 1 <= max_ticks) {
      scale.low = low * step;
      scale.high = std::max(high, low + 1) * step;
      break;
    }
    step *= kNext[i % 3];
  }
  const int n = static_cast<int>(std::lround((scale.high - scale.low) / step));
  for (int i = 0; i <= n; ++i) {
    const double t = scale.low + i * step;
    scale.ticks.emplace_back(t, Short(std::abs(t) < step * 1e-6 ? 0 : t));
  }
  return scale;
}

}  // namespace

double Scale::Part(double value) const {
  if (!logarithmic) return (value - low) / (high - low);
  return std::log(std::max(value, 1e-300) / low) / std::log(high / low);
}

Scale ScaleOf(const Axis& axis, int max_ticks) {
  return axis.logarithmic ? LogScale(axis, max_ticks) : LinearScale(axis, max_ticks);
}

}  // namespace prefixd::bench
