#include "prefixd/ledger.h"

namespace prefixd {

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
