#include "attention/step/missing_mass.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>

namespace prefixd {
namespace {

// Returns the real-valued optimum of a head at price 1 / scale^2 per token.
double Share(const HeadDemand& head, double scale) {
  const double pull = head.missing_mass * std::max(1u, head.k_reference);
  const double k = pull > 0 ? scale * std::sqrt(pull) : 0.0;
  return std::clamp(k, double{1} * head.k_min, double{1} * head.k_max);
}

double Total(std::span<const HeadDemand> heads, double scale) {
  double sum = 0;
  for (const HeadDemand& head : heads) sum += Share(head, scale);
  return sum;
}

}  // namespace

MissingMass MissingMassOf(const Cut& cut, uint64_t remaining, double lse_exact, double rho_z) {
  if (remaining == 0) return {0, true};
  if (cut.kind != CutKind::kExact || std::isnan(cut.score) || std::isnan(lse_exact)) {
    return {std::clamp(std::isnan(rho_z) ? 1.0 : rho_z, 0.0, 1.0), false};
  }
  // In logs: e^x / (1 + e^x) with x = log(|R| e^c) - log Z_E.
  const double x = std::log(static_cast<double>(remaining)) + cut.score - lse_exact;
  return {std::isnan(x) ? 1.0 : 1 / (1 + std::exp(-x)), true};
}

double InformationLoss(double delta, uint64_t n_tokens) {
  const auto term = [](double p) { return p > 0 ? -p * std::log(p) : 0.0; };
  const double entropy = term(delta) + term(1 - delta);
  return 2 * (entropy + delta * std::log(static_cast<double>(std::max<uint64_t>(1, n_tokens))));
}

Result<std::vector<uint32_t>> AllocateTokens(std::span<const HeadDemand> heads, uint64_t total) {
  uint64_t least = 0, most = 0;
  for (size_t h = 0; h < heads.size(); ++h) {
    if (heads[h].k_min > heads[h].k_max) {
      return InvalidArgument("head " + std::to_string(h) + " asks for at least " +
                             std::to_string(heads[h].k_min) + " and at most " +
                             std::to_string(heads[h].k_max) + " tokens");
    }
    least += heads[h].k_min;
    most += heads[h].k_max;
  }
  if (least > total) {
    return Error{Code::kInfeasible, "a budget of " + std::to_string(total) +
                                        " tokens does not pay for the heads' minimum of " +
                                        std::to_string(least)};
  }
  const double target = static_cast<double>(std::min(total, most));
  // Finds the common scale at which the shares add up to the target; their sum grows with it.
  double low = 0, high = 1;
  for (int step = 0; step < 200 && Total(heads, high) < target && high < 1e150; ++step) high *= 2;
  for (int step = 0; step < 200; ++step) {
    const double middle = (low + high) / 2;
    (Total(heads, middle) < target ? low : high) = middle;
  }
  std::vector<uint32_t> k(heads.size());
  std::vector<double> part(heads.size());
  uint64_t left = std::min(total, most);
  for (size_t h = 0; h < heads.size(); ++h) {
    const double share = Share(heads[h], low);
    k[h] = static_cast<uint32_t>(std::floor(share));
    part[h] = share - k[h];
    left -= k[h];
  }
  // Rounds to whole tokens: the largest fractions first, then heads with room.
  std::vector<size_t> order(heads.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return part[a] > part[b]; });
  for (size_t h : order) {
    if (left == 0) break;
    if (part[h] > 0 && k[h] < heads[h].k_max) {
      ++k[h];
      --left;
    }
  }
  for (size_t h = 0; h < heads.size() && left > 0; ++h) {
    const uint32_t more = static_cast<uint32_t>(std::min<uint64_t>(left, heads[h].k_max - k[h]));
    k[h] += more;
    left -= more;
  }
  return k;
}

}  // namespace prefixd
