// Measures indexes over the keys of a head against an exact scan of the same keys.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <vector>

#include "bench/prompts/head_trace.h"
#include "prefixd/policy.h"
#include "prefixd/result.h"

namespace prefixd::bench {

// Members are means over heads and steps unless they say otherwise; K is 1% of the keys.
struct IndexResult {
  std::string index;
  double bytes_per_key = 0, build_seconds = 0;  // per head, tuning included
  double effort = 0;                            // as tuned (index::KeyIndex::effort)
  double keys_scanned = 0;                      // fraction
  double bytes_fraction = 0;                    // read by a search, as a share of all keys in bf16
  double recall_100 = 0, recall_k = 0;
  double worst_recall_k = 1;  // worst head, mean over its steps
  double relative_mass = 0;   // recovered attention mass over that of the exact set
  double median_ms = 0, p99_ms = 0;
  double speedup = 0;  // median of exact scan / this, for the same query in turn
};

struct MeasureOptions {
  uint32_t rounds = 3;
  std::string only;            // part of the names of the indexes to measure besides exact
  std::vector<float> efforts;  // each is searched with (KeyIndex::SetEffort); empty: tuned
  bool cpu_time = false;       // measure the process's CPU time, because other work runs beside it
};

// The exact index comes first. Every index is built from the keys and the put's samples alone. It
// is tuned to a recall of 0.95 on half of the samples, except those called untuned, or where
// efforts are given.
Result<std::vector<IndexResult>> MeasureIndexes(std::span<const HeadTrace> heads,
                                                const MeasureOptions& options);

// Measures the default index with its sets shared between steps (CIS), over all steps of a head:
// what a step reads for its share of the searches, and how good the sets are for the steps that use
// them.
struct SharedResult {
  StepPolicy::Sharing sharing;
  double rho = 0;              // searches per step
  double search_bytes = 0;     // per search, as a share of all keys in bf16
  double amortized_bytes = 0;  // per step
  double tokens = 0;           // read by a step, in multiples of K
  double recall_k = 0;         // share of each step's own exact Top-K
  double relative_mass = 0;    // as in IndexResult
};
Result<std::vector<SharedResult>> MeasureSharedSearches(
    const HeadTrace& head, std::span<const StepPolicy::Sharing> settings);

// Measures the scan kernel by itself, over codes several times the last-level cache, and in turn a
// plain read of the same memory.
struct ScanResult {
  double one_head = 0, four_heads = 0, bandwidth = 0;  // bytes per second, medians
  double four_heads_fraction = 0;                      // median of each turn's ratio
};
Result<ScanResult> MeasureScan(uint32_t rounds);

}  // namespace prefixd::bench
