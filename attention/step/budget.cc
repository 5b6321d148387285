#include <algorithm>
#include <cmath>
#include <cstdio>
#include <string>

#include "attention/step/budget.h"
#include "prefixd/ledger.h"

namespace prefixd {

namespace {

double InTokens(const RowShape& row, double elements, uint32_t bytes_per_element) {
  return elements * bytes_per_element / static_cast<double>(row.bytes());
}

}  // namespace

double PhiTokens(const RowShape& row, uint32_t d_phi, uint32_t phi_bytes_per_element) {
  const double elements = double{1} * d_phi * row.value_dim + 2.0 * d_phi;  // T, and m and u
  return InTokens(row, elements, phi_bytes_per_element);
}

double MomentTokens(const RowShape& row, uint32_t cross_rank, uint32_t bytes_per_element) {
  double elements = 2.0 * row.key_dim + row.value_dim;
  if (cross_rank >= row.key_dim) {
    elements += double{1} * row.key_dim * row.value_dim;
  } else {
    elements += double{1} * cross_rank * (row.key_dim + row.value_dim);
  }
  return InTokens(row, elements, bytes_per_element);
}

double FeatureTokens(const RowShape& row, uint32_t d_phi, uint32_t bits) {
  return d_phi * (bits / 8.0) / static_cast<double>(row.bytes());
}

namespace {

// Formats token-equivalents for a message: "66" or "4.1".
std::string Tokens(double tokens) {
  char text[32];
  std::snprintf(text, sizeof text, tokens == std::floor(tokens) ? "%.0f" : "%.1f", tokens);
  return text;
}

}  // namespace

Result<BudgetPlan> PlanBudget(uint32_t n_tokens, Anchors anchors, double fraction,
                              double estimator_tokens, uint32_t l_gen, double token_cost) {
  if (!(fraction > 0 && fraction <= 1)) {
    return InvalidArgument("budget fraction must be in (0, 1], e.g. 0.01 for 1% of the prefix");
  }
  if (!(estimator_tokens >= 0) || !std::isfinite(estimator_tokens)) {
    return InvalidArgument("estimator cost must be a finite number of tokens, 0 or more");
  }
  if (!(token_cost >= 1) || !std::isfinite(token_cost)) {
    return InvalidArgument("a retrieved token costs 1 token or more");
  }
  if (l_gen == 0) return InvalidArgument("l_gen must be at least 1 generated token");

  const Partition partition = Partition::Of(n_tokens, anchors);
  BudgetPlan plan;
  // fraction * N is meant exactly: 0.07 * 100 must give 7 although it is 7.000000000000001.
  const double exact = fraction * n_tokens;
  plan.total_tokens = static_cast<uint32_t>(std::ceil(exact * (1 - 1e-12)));
  plan.anchor_tokens = partition.anchor_count();
  plan.estimator_tokens = l_gen == 1 ? std::ceil(estimator_tokens) : estimator_tokens / l_gen;

  const double left = double{1} * plan.total_tokens - plan.anchor_tokens - plan.estimator_tokens;
  if (left < 0) {
    const double need = plan.anchor_tokens + std::ceil(plan.estimator_tokens);
    return Error{Code::kInfeasible,
                 "a budget of " + std::to_string(plan.total_tokens) + " of " +
                     std::to_string(n_tokens) + " tokens cannot pay for " +
                     std::to_string(plan.anchor_tokens) + " anchors and a summary worth " +
                     Tokens(plan.estimator_tokens) + " tokens; at least " +
                     std::to_string(static_cast<uint64_t>(need)) + " are needed"};
  }
  plan.k = std::min(static_cast<uint32_t>(std::floor(left / token_cost)), partition.mid.size());
  return plan;
}

double VariantTokens(const EstimatorVariant& v, const RowShape& row, uint32_t d_phi,
                     uint32_t clusters) {
  const double dk = row.key_dim, dv = row.value_dim, n = clusters;
  const double floats = sizeof(float) / static_cast<double>(row.bytes());
  switch (v.kind) {
    case EstimatorKind::kMoment: {
      const bool factored = v.rank < std::min(row.key_dim, row.value_dim);
      return MomentTokens(row, factored ? v.rank : row.key_dim, sizeof(float)) +
             (v.covariance ? floats * dk * (dk + 1) / 2 : 0);
    }
    case EstimatorKind::kPhi:
      // m stays float32 also in a bf16 cache.
      return d_phi == 0 ? 0
             : v.bf16   ? PhiTokens(row, d_phi, 2) + d_phi * 2.0 / double(row.bytes())
                        : PhiTokens(row, d_phi, 4);
    case EstimatorKind::kCentroid:  // with a count per cluster
      return floats * n * (1 + dk + 1 + dv);
    case EstimatorKind::kScan:
      return floats * n * (1 + dv);
    default:
      return 0;
  }
}

}  // namespace prefixd
