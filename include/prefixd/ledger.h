// The ledger: what a session, or one layer and KV head of it, has read (spec §4).
// Thread-safety: plain values.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "prefixd/estimator_variant.h"

namespace prefixd {

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
  uint64_t prefetched_bytes = 0, prefetch_used_bytes = 0;
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
