#include "attention/ledger.h"

#include <cmath>
#include <cstdio>
#include <string>

namespace prefixd {

std::string_view EstimatorName(EstimatorKind kind) {
  switch (kind) {
    case EstimatorKind::kNone:
      return "none";
    case EstimatorKind::kPhi:
      return "phi";
    case EstimatorKind::kMoment:
      return "moment";
    case EstimatorKind::kCentroid:
      return "centroid";
    case EstimatorKind::kClusterMoment:
      return "cluster_moment";
    case EstimatorKind::kScan:
      return "scan";
    case EstimatorKind::kAuto:
      return "auto";
  }
  return "unknown";
}

Result<EstimatorKind> EstimatorFromName(std::string_view name) {
  for (EstimatorKind kind :
       {EstimatorKind::kNone, EstimatorKind::kPhi, EstimatorKind::kMoment, EstimatorKind::kCentroid,
        EstimatorKind::kClusterMoment, EstimatorKind::kScan, EstimatorKind::kAuto}) {
    if (EstimatorName(kind) == name) return kind;
  }
  return InvalidArgument("unknown estimator '" + std::string(name) +
                         "'; known: none, phi, moment, centroid, cluster_moment, scan, auto");
}

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

// "66" or "4.1": token-equivalents in a message.
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

Ledger& Ledger::operator+=(const Ledger& other) {
  steps += other.steps;
  anchor_tokens += other.anchor_tokens;
  retrieved_tokens += other.retrieved_tokens;
  summary_tokens += other.summary_tokens;
  charged_summary_tokens += other.charged_summary_tokens;
  logical_bytes += other.logical_bytes;
  for (size_t kind = 0; kind < kEstimatorKinds; ++kind) {
    summary_bytes[kind] += other.summary_bytes[kind];
  }
  feature_tokens += other.feature_tokens;
  feature_bytes += other.feature_bytes;
  for (size_t tier = 0; tier < kTierCount; ++tier) {
    physical_bytes[tier] += other.physical_bytes[tier];
  }
  ahead_bytes += other.ahead_bytes;
  ahead_used_bytes += other.ahead_used_bytes;
  keys_scanned += other.keys_scanned;
  scan_bytes += other.scan_bytes;
  selections += other.selections;
  retrievals += other.retrievals;
  rho_z_sum += other.rho_z_sum;
  rho_z_count += other.rho_z_count;
  select_ns += other.select_ns;
  read_ns += other.read_ns;
  compute_ns += other.compute_ns;
  return *this;
}

}  // namespace prefixd
