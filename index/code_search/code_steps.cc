#include "index/code_search/code_steps.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
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

using Floats = float __attribute__((vector_size(16)));
using Whole = int32_t __attribute__((vector_size(16)));
constexpr size_t kLanes = 4, kRun = 64;  // elements of a lane that are summed in float32

// Sums over x, standardised, and over the codes that it gets, about their middle.
struct Sums {
  double error = 0, c = 0, cc = 0, cx = 0;
};

// `low` and `step` are those of codes 0 to `top`.
Sums Assign(std::span<const float> x, float low, float step, float top) {
  const Floats none = {};
  const float per_step = 1 / step, half = top / 2;
  Sums out;
  const size_t whole = x.size() / kLanes * kLanes;
  for (size_t begin = 0; begin < whole; begin += kRun * kLanes) {
    const size_t end = std::min(whole, begin + kRun * kLanes);
    Floats error = none, c = none, cc = none, cx = none;
    for (size_t i = begin; i < end; i += kLanes) {
      Floats v;
      std::memcpy(&v, x.data() + i, sizeof v);
      Floats at = (v - low) * per_step;
      at = at < 0.0f ? none : at;
      at = at > top ? none + top : at;
      const Floats code =
          __builtin_convertvector(__builtin_convertvector(at + 0.5f, Whole), Floats);
      const Floats miss = v - low - step * code, centred = code - half;
      error += miss * miss;
      c += centred;
      cc += centred * centred;
      cx += centred * v;
    }
    for (size_t lane = 0; lane < kLanes; ++lane) {
      out.error += error[lane];
      out.c += c[lane];
      out.cc += cc[lane];
      out.cx += cx[lane];
    }
  }
  for (const float v : x.subspan(whole)) {
    const float code = std::floor(std::clamp((v - low) * per_step, 0.0f, top) + 0.5f);
    const float miss = v - low - step * code, centred = code - half;
    out.error += miss * miss;
    out.c += centred;
    out.cc += centred * centred;
    out.cx += centred * v;
  }
  return out;
}

}  // namespace

Steps FitSteps(std::span<const float> x, uint32_t levels) {
  const double n = double(x.size());
  const auto top = static_cast<float>(levels - 1);
  double mean = 0, square = 0;
  const auto [least, most] = std::minmax_element(x.begin(), x.end());
  for (const double v : x) mean += v / n;
  for (const double v : x) square += (v - mean) * (v - mean) / n;
  const double sigma = std::sqrt(square);
  if (!(sigma > 0) || !(*most > *least)) return {mean, 0, 0};
  std::vector<float> z(x.size());
  for (size_t i = 0; i < x.size(); ++i) z[i] = static_cast<float>((x[i] - mean) / sigma);
  const double sum = std::accumulate(z.begin(), z.end(), 0.0);
  const auto [low, high] = std::minmax_element(z.begin(), z.end());
  Steps best;
  for (const float width : {1.5f, 2.2f, 3.0f, 4.5f, 0.0f}) {  // 0: all of the range
    Steps now{-width, 2 * width / top, 0};
    if (width == 0) now = {*low, (*high - *low) / top, 0};
    for (int round = 0; round < 6 && now.step > 0; ++round) {
      const Sums sums = Assign(z, static_cast<float>(now.low), static_cast<float>(now.step), top);
      now.error = sums.error;
      if (now.error < best.error) best = now;
      const double spread = sums.cc - sums.c * sums.c / n;
      if (!(spread > 0)) break;
      now.step = (sums.cx - sums.c * sum / n) / spread;
      now.low = sum / n - now.step * (sums.c / n + top / 2);
    }
  }
  return {mean + sigma * best.low, sigma * best.step, sigma * sigma * best.error};
}

}  // namespace prefixd::index
