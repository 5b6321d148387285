#include "measure/map/trade_off.h"

#include <algorithm>
#include <cmath>

namespace prefixd::bench {

TradeOff::TradeOff(std::vector<SweepPoint> sweep, double k_phi)
    : sweep_(std::move(sweep)), k_phi_(k_phi) {}

StepTimes TradeOff::At(double k) const {
  size_t i = 1;
  while (i + 1 < sweep_.size() && sweep_[i].k < k) ++i;
  const SweepPoint &a = sweep_[i - 1], &b = sweep_[i];
  const double part = (k - a.k) / (b.k - a.k);
  const auto between = [&](double StepTimes::*what) {
    return std::max(0.0, a.ms.*what + part * (b.ms.*what - a.ms.*what));
  };
  return {between(&StepTimes::select), between(&StepTimes::load), between(&StepTimes::compute)};
}

double TradeOff::TopK(double xi, double k, bool with_selection) const {
  const StepTimes t = At(k);
  return t.compute + xi * t.load + (with_selection ? t.select : 0);
}

double CompletedMs(const CompletedTimes& done, double xi, double c, bool with_selection) {
  return done.ms.compute + c * done.estimate + xi * done.ms.load +
         (with_selection ? done.ms.select : 0);
}

double TradeOff::Speedup(const CompletedTimes& completed, double xi, double gamma, double c,
                         bool with_selection) const {
  const double cost = CompletedMs(completed, xi, c, with_selection);
  return TopK(xi, gamma * k_phi_, with_selection) / std::max(cost, 1e-12);
}

std::optional<double> TradeOff::BreakEvenGamma(const CompletedTimes& completed, double xi, double c,
                                               bool with_selection) const {
  const double cost = CompletedMs(completed, xi, c, with_selection);
  const auto topk = [&](double gamma) { return TopK(xi, gamma * k_phi_, with_selection); };
  double low = 1, below = topk(1);
  if (below >= cost) return 1;
  // The times are linear between the points of the sweep; where one is cut off at 0, the search in
  // small steps keeps the result right to a thousandth.
  std::vector<double> stops;
  for (double g = 1.05; g < kMaxGamma; g += 0.05) stops.push_back(g);
  for (const SweepPoint& p : sweep_) stops.push_back(p.k / k_phi_);
  stops.push_back(kMaxGamma);
  std::sort(stops.begin(), stops.end());
  for (const double high : stops) {
    if (high <= low || high > kMaxGamma) continue;
    const double above = topk(high);
    if (above >= cost) return low + (high - low) * (cost - below) / (above - below);
    low = high;
    below = above;
  }
  return std::nullopt;
}

std::vector<double> LogSteps(double end, int n) {
  std::vector<double> out;
  for (int i = 0; i < n; ++i) out.push_back(std::pow(end, double(i) / (n - 1)));
  out.back() = end;
  return out;
}

}  // namespace prefixd::bench
