#include "runtime/step/adaptive_budget.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

namespace prefixd {
namespace {

// Bounds a head's share as multiples of its fixed k.
constexpr double kLeast = 0.25, kMost = 4;
// Weight of the last step in the running mean.
constexpr double kNew = 0.25;

}  // namespace

AdaptiveBudget::AdaptiveBudget(std::vector<uint32_t> k, uint32_t most)
    : most_(most),
      fixed_(std::move(k)),
      total_(std::accumulate(fixed_.begin(), fixed_.end(), uint64_t{0})),
      k_(fixed_),
      pull_(fixed_.size(), std::numeric_limits<double>::quiet_NaN()),
      taken_(fixed_.size()) {}

std::vector<uint32_t> AdaptiveBudget::Take(size_t first, uint32_t n) {
  std::lock_guard lock(mutex_);
  const auto taken = taken_.begin() + static_cast<ptrdiff_t>(first);
  if (std::find(taken, taken + n, true) != taken + n) {
    std::fill(taken_.begin(), taken_.end(), false);
    Allocate();
  }
  std::fill_n(taken, n, true);
  const auto k = k_.begin() + static_cast<ptrdiff_t>(first);
  return {k, k + n};
}

void AdaptiveBudget::Note(size_t head, double rho_z, uint32_t k) {
  if (!std::isfinite(rho_z)) return;
  std::lock_guard lock(mutex_);
  const double pull = rho_z * std::max(1u, k);
  pull_[head] = std::isnan(pull_[head]) ? pull : (1 - kNew) * pull_[head] + kNew * pull;
}

void AdaptiveBudget::Allocate() {
  // Heads without a measurement keep what the fixed plan gives them.
  std::vector<HeadDemand> demands;
  std::vector<size_t> heads;
  uint64_t total = total_;
  for (size_t head = 0; head < fixed_.size(); ++head) {
    if (fixed_[head] == 0 || std::isnan(pull_[head])) {
      total -= fixed_[head];
      k_[head] = fixed_[head];
      continue;
    }
    const double k = fixed_[head];
    demands.push_back({pull_[head], 1, static_cast<uint32_t>(std::ceil(kLeast * k)),
                       std::min(most_, static_cast<uint32_t>(std::ceil(kMost * k)))});
    heads.push_back(head);
  }
  const auto shared = AllocateTokens(demands, total);
  if (!shared.ok()) return;  // unreachable: the minimums are below the fixed plan
  for (size_t i = 0; i < heads.size(); ++i) k_[heads[i]] = (*shared)[i];
}

}  // namespace prefixd
