// The token-equivalent read budget (spec §4, paper 001 App. D) and the ledger of what was read.
#pragma once

#include <array>
#include <cstdint>

#include "attention/kv_shape.h"
#include "attention/partition.h"
#include "attention/result.h"

namespace prefixd {

// The estimators of the remainder (spec §3).
enum class EstimatorKind : uint8_t {
  kNone = 0,
  kPhi = 1,
  kMoment = 2,
  kCentroid = 3,       // clusters of keys, second order in their spread
  kClusterMoment = 4,  // a tilted moment estimate per cluster
  kScan = 5,           // masses by the selector's own scan, values by cluster
  kAuto = 255,
};
// "none", "phi", "moment", "centroid", "cluster_moment", "scan", "auto"
std::string_view EstimatorName(EstimatorKind kind);
Result<EstimatorKind> EstimatorFromName(std::string_view name);

// Token-equivalents of a stored phi cache: (b_phi/b)(d_phi/2 + d_phi/dh) for dv = dh, eq. [47].
double PhiTokens(const RowShape& row, uint32_t d_phi, uint32_t phi_bytes_per_element);
// Token-equivalents of a moment summary: mean key, diagonal variance, mean value, and with
// cross_rank r the factor of the cross moment (r * (key_dim + value_dim) elements); r = key_dim
// stands for the whole key_dim x value_dim matrix.
double MomentTokens(const RowShape& row, uint32_t cross_rank, uint32_t bytes_per_element);

// Token-equivalents that stored features add to each retrieved token: d_phi elements of `bits`.
double FeatureTokens(const RowShape& row, uint32_t d_phi, uint32_t bits);

// How many mid tokens a budget of `fraction` of the prefix pays for, per KV head and step.
struct BudgetPlan {
  uint32_t total_tokens = 0;  // n(f) = ceil(f N), eq. [13]
  uint32_t anchor_tokens = 0;
  double estimator_tokens = 0;  // what the summary costs, divided by l_gen
  uint32_t k = 0;               // retrieved tokens, eqs. [14], [16], [18]
};
// l_gen: generated tokens over which the summary is amortised; 1 charges it in full to one step
// (then it is rounded up to whole tokens). kInfeasible when n(f) cannot pay for the anchors and
// the summary. fraction in (0, 1]. token_cost: what one retrieved token costs in tokens, 1 and
// FeatureTokens where features are read beside rows.
Result<BudgetPlan> PlanBudget(uint32_t n_tokens, Anchors anchors, double fraction,
                              double estimator_tokens, uint32_t l_gen = 1, double token_cost = 1);

inline constexpr size_t kEstimatorKinds = 6;  // without kAuto

enum class Tier : uint8_t { kGpu = 0, kHost = 1, kSsd = 2 };
inline constexpr size_t kTierCount = 3;

// What a session (or one layer and KV head of it) has read. Plain sums: add them freely.
struct Ledger {
  uint64_t steps = 0;  // layer-steps times KV heads
  uint64_t anchor_tokens = 0;
  uint64_t retrieved_tokens = 0;
  double summary_tokens = 0;          // fetched once per attach, in token-equivalents
  double charged_summary_tokens = 0;  // what each step's budget paid for the summary, summed
  uint64_t logical_bytes = 0;         // rows asked for, summaries, features
  std::array<uint64_t, kEstimatorKinds> summary_bytes{};  // of these, summaries by EstimatorKind
  double feature_tokens = 0;   // stored features read beside rows, in token-equivalents
  uint64_t feature_bytes = 0;  // the same in bytes
  // What devices and tiers really moved: not keys, nor copies of rows, that are held in memory.
  std::array<uint64_t, kTierCount> physical_bytes{};
  // Apart from those: read into host memory before a step wanted it, and what steps used of what
  // was read so for any session of the tenant.
  uint64_t ahead_bytes = 0, ahead_used_bytes = 0;
  uint64_t keys_scanned = 0;  // by the selector
  uint64_t scan_bytes = 0;
  uint64_t selections = 0;  // sets used; each by a search of its own ...
  uint64_t retrievals = 0;  // ... there would be as many searches
  double rho_z_sum = 0;     // completion share per query head, summed [56]
  uint64_t rho_z_count = 0;
  uint64_t select_ns = 0, read_ns = 0, compute_ns = 0;

  // Searches made, of those that one for every step would be (spec §8); 0 where none was due.
  double retrieval_ratio() const {
    return selections ? double(retrievals) / double(selections) : 0.0;
  }
  double mean_rho_z() const { return rho_z_count ? rho_z_sum / double(rho_z_count) : 0.0; }
  // Token-equivalents per step and KV head, as the budget accounts them.
  double tokens_per_step() const {
    return steps ? (double(anchor_tokens + retrieved_tokens) + feature_tokens +
                    charged_summary_tokens) /
                       double(steps)
                 : 0.0;
  }
  Ledger& operator+=(const Ledger& other);
};

}  // namespace prefixd
