// Computes the trade-off map ([RC] App. F and G): when reading K tokens and estimating the rest is
// as fast as reading gamma times K tokens, where reads are xi times slower than measured.
//
//   t_topk(xi, k)      = t_compute(k) + xi * t_load(k)
//   t_completed(xi, c) = t_compute' + c * t_estimate + xi * t_load'     at k_phi
//   speedup(xi, gamma; c) = t_topk(xi, gamma * k_phi) / t_completed(xi, c)
//
// The paper leaves the time of selection out; `with_selection` adds it to both. c says how much of
// the measured time the estimate takes.
//
// Thread-safety: plain values and pure functions.
#pragma once

#include <optional>
#include <string>
#include <vector>

namespace prefixd::bench {

// Milliseconds per generated token.
struct StepTimes {
  double select = 0, load = 0, compute = 0;
};

struct SweepPoint {
  double k = 0;  // tokens read
  StepTimes ms;
};

// Reading k_phi tokens and estimating the rest; `ms.compute` is without the estimate.
struct CompletedTimes {
  StepTimes ms;
  double estimate = 0;
};

class TradeOff {
 public:
  static constexpr double kMaxGamma = 10, kMaxXi = 100;  // both axes begin at 1

  // `sweep` ascends in k and has at least two points.
  TradeOff(std::vector<SweepPoint> sweep, double k_phi);

  // Times at k: linear between the points, continued from the nearest segment, never below 0.
  StepTimes At(double k) const;
  double TopK(double xi, double k, bool with_selection) const;
  double Speedup(const CompletedTimes& completed, double xi, double gamma, double c,
                 bool with_selection) const;
  // Returns the least gamma of [1, kMaxGamma] from which completion is at least as fast; 1 also
  // where it is faster already there; nothing where it is slower throughout.
  std::optional<double> BreakEvenGamma(const CompletedTimes& completed, double xi, double c,
                                       bool with_selection) const;
  double k_phi() const { return k_phi_; }

 private:
  std::vector<SweepPoint> sweep_;
  double k_phi_;
};

double CompletedMs(const CompletedTimes& completed, double xi, double c, bool with_selection);

// Returns n points of [1, end], evenly spaced in the logarithm, both ends included.
std::vector<double> LogSteps(double end, int n);

}  // namespace prefixd::bench
