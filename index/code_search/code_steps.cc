#include "index/code_search/code_steps.h"

#include <algorithm>
#include <cmath>
#include <queue>
#include <utility>

namespace prefixd::index {

std::vector<uint8_t> AllocateDigits(std::span<const double> variances, uint32_t fields) {
  std::vector<uint8_t> digits(variances.size(), 0);
  using Gain = std::pair<double, size_t>;
  std::priority_queue<Gain> gains;
  const auto offer = [&](size_t i) {
    if (digits[i] == kMaxCodeDigits || !(variances[i] > 0)) return;
    gains.emplace(variances[i] * (kErrorLeft[digits[i]] - kErrorLeft[digits[i] + 1]), i);
  };
  for (size_t i = 0; i < variances.size(); ++i) offer(i);
  for (uint32_t used = 0; used < fields && !gains.empty(); ++used) {
    const size_t i = gains.top().second;
    gains.pop();
    ++digits[i];
    offer(i);
  }
  return digits;
}

namespace {

double CodeOf(double x, double low, double step, double top) {
  return std::clamp(std::nearbyint((x - low) / step), 0.0, top);
}

}  // namespace

Steps FitSteps(std::span<const double> x, uint32_t levels) {
  const double n = double(x.size()), top = levels - 1;
  double mean = 0, square = 0;
  const auto [least, most] = std::minmax_element(x.begin(), x.end());
  for (const double v : x) mean += v / n;
  for (const double v : x) square += (v - mean) * (v - mean) / n;
  const double sigma = std::sqrt(square);
  if (!(sigma > 0) || !(*most > *least)) return {mean, 0, 0};
  Steps best;
  for (const double width : {1.5, 2.2, 3.0, 4.5, 0.0}) {  // 0: all of the range
    Steps now{mean - width * sigma, 2 * width * sigma / top, 0};
    if (width == 0) now = {*least, (*most - *least) / top, 0};
    for (int round = 0; round < 6 && now.step > 0; ++round) {
      double c1 = 0, c2 = 0, xc = 0;
      now.error = 0;
      for (const double v : x) {
        const double c = CodeOf(v, now.low, now.step, top);
        const double miss = v - now.low - now.step * c;
        now.error += miss * miss;
        c1 += c;
        c2 += c * c;
        xc += c * v;
      }
      if (now.error < best.error) best = now;
      const double spread = c2 - c1 * c1 / n;
      if (!(spread > 0)) break;
      now.step = (xc - c1 * mean) / spread;
      now.low = mean - now.step * c1 / n;
    }
  }
  return best;
}

}  // namespace prefixd::index
