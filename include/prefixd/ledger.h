// Counts what a session, or one layer and KV head of it, has read (docs/mathematics.md).
//
// Thread-safety: plain values.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "prefixd/estimator_variant.h"

namespace prefixd {

enum class Tier : uint8_t { kGpu = 0, kHost = 1, kSsd = 2 };
inline constexpr size_t kTierCount = 3;

// All members are sums, so ledgers of disjoint sets of steps add.
struct Ledger {
  uint64_t steps = 0;  // layer-steps times KV heads
  uint64_t anchor_tokens = 0;
  uint64_t retrieved_tokens = 0;
  uint64_t retained_tokens = 0;       // attended to in memory (StepPolicy::Retain), and not read
  double summary_tokens = 0;          // fetched once per attach, in token-equivalents
  double charged_summary_tokens = 0;  // what each step's budget paid for the summary, summed
  uint64_t logical_bytes = 0;         // rows that steps read, summaries, features
  std::array<uint64_t, kEstimatorKinds> summary_bytes{};  // summaries in it, by EstimatorKind
  double feature_tokens = 0;   // stored features read beside rows, in token-equivalents
  uint64_t feature_bytes = 0;  // the same in bytes
  // The bytes that devices and tiers really moved, without keys and copies of rows held in memory.
  std::array<uint64_t, kTierCount> physical_bytes{};
  // physical_bytes leaves out prefetched bytes. prefetch_used_bytes are the bytes that steps of
  // this session used, prefetched for any session of the tenant.
  uint64_t prefetched_bytes = 0, prefetch_used_bytes = 0;
  uint64_t keys_scanned = 0;  // in selection
  uint64_t scan_bytes = 0;
  uint64_t selections = 0;  // retrieved sets used, shared ones each time
  uint64_t retrievals = 0;  // searches made for these sets
  double rho_z_sum = 0;     // completion share per query head, summed [56]
  uint64_t rho_z_count = 0;
  uint64_t select_ns = 0, read_ns = 0, compute_ns = 0;

  // The share of searches made in those that steps without sharing would make ([PrHS]); 0 if no
  // set was used.
  double retrieval_ratio() const {
    return selections ? double(retrievals) / double(selections) : 0.0;
  }
  double mean_rho_z() const { return rho_z_count ? rho_z_sum / double(rho_z_count) : 0.0; }
  // Token-equivalents per step and KV head, counted as the budget counts them.
  double tokens_per_step() const {
    return steps ? (double(anchor_tokens + retrieved_tokens) + feature_tokens +
                    charged_summary_tokens) /
                       double(steps)
                 : 0.0;
  }
  Ledger& operator+=(const Ledger& other);
};

}  // namespace prefixd
