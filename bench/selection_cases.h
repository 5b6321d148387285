// Indexes over the keys of a head, measured against an exact scan of the same keys.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <vector>

#include "bench/support/head_trace.h"
#include "prefixd/result.h"
#include "prefixd/types.h"

namespace prefixd::bench {

// Means over heads and steps, unless said otherwise; K is 1% of the keys.
struct IndexResult {
  std::string index;
  double bytes_per_key = 0, build_seconds = 0;  // of one head, tuning included
  double effort = 0;                            // as tuned (index::KeyIndex::effort)
  double keys_scanned = 0;                      // fraction
  double bytes_fraction = 0;                    // read by a search, of all keys in bf16
  double recall_100 = 0, recall_k = 0;
  double worst_recall_k = 1;  // of a head, over its steps
  double relative_mass = 0;   // recovered attention mass over that of the exact set
  double median_ms = 0, p99_ms = 0;
  double speedup = 0;  // median of: exact scan / this, of the same query in turn
};

struct MeasureOptions {
  uint32_t rounds = 3;
  std::string only;            // of the indexes besides exact, those whose names contain this
  std::vector<float> efforts;  // searched with each of them (KeyIndex::SetEffort); empty: tuned
  bool cpu_time = false;       // of the process, instead of the clock's: beside other work
};

// Exact first. Every index is built from the keys and the put's samples alone, and but for those
// called untuned, or where efforts are given, tuned to a recall of 0.95 by half of the samples.
Result<std::vector<IndexResult>> MeasureIndexes(std::span<const HeadTrace> heads,
                                                const MeasureOptions& options);

// The default index with its sets shared between steps (CIS), over all steps of a head: what a step
// reads for its share of the searches, and how good the sets then are for the steps that use them.
struct SharedResult {
  StepPolicy::Sharing sharing;
  double rho = 0;              // searches made, of one for each step
  double search_bytes = 0;     // of a search, of all keys in bf16
  double amortized_bytes = 0;  // of a step
  double tokens = 0;           // read by a step, of K
  double recall_k = 0;         // of each step's own exact Top-K
  double relative_mass = 0;    // as IndexResult
};
Result<std::vector<SharedResult>> MeasureSharedSearches(
    const HeadTrace& head, std::span<const StepPolicy::Sharing> settings);

// The scan kernel by itself, over codes several times the last-level cache, beside a plain read of
// the same memory in turn.
struct ScanResult {
  double one_head = 0, four_heads = 0, bandwidth = 0;  // bytes per second, medians
  double four_heads_fraction = 0;                      // median of each turn's ratio
};
Result<ScanResult> MeasureScan(uint32_t rounds);

}  // namespace prefixd::bench
