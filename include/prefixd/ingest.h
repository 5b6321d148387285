// Tells what ingest has made of a stored prefix: how far it is, the estimator that it chose for
// each head, and how well its indexes find tokens.
//
// Thread-safety: plain values and pure functions.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "prefixd/estimator_variant.h"

namespace prefixd {

// The state of a prefix's blobs, which ingest makes after the commit; rows are durable already.
// kDeferred: nothing has asked for them (RuntimeOptions::defer_ingest).
enum class IngestState : uint8_t { kPending, kRunning, kReady, kFailed, kDeferred };
std::string_view IngestStateName(IngestState state);

struct EstimatorError {
  EstimatorVariant estimator = EstimatorKind::kNone;
  double error = 0;  // mean relative l1 output error on the held-out queries
  bool operator==(const EstimatorError&) const = default;
};

struct HeadChoice {
  uint32_t layer = 0, kv_head = 0;
  EstimatorVariant chosen = EstimatorKind::kNone;
  double budget = 0;
  // Errors of all estimators that the budget can pay for, in order of preference. The chosen one is
  // the first that the default selector has: with codes, the first that is not scan.
  std::vector<EstimatorError> errors;
  bool operator==(const HeadChoice&) const = default;
};

// The measured recall of a head's index at 1% of the keys, on half of the sampled queries of the
// prefill; the other half tuned the index.
struct IndexRecall {
  uint32_t layer = 0, kv_head = 0;
  std::string index;     // "codes", "ivf"
  uint32_t queries = 0;  // 0: untuned, the put gave no queries to measure with
  uint32_t k = 0;
  double recall = 0;  // recall@k
  double mass = 0;    // attention mass over that of the exact set, worst query head
  double effort = 0;  // ivf: fraction of lists probed; others: keys scored per token returned
  bool used = true;   // false: it misses RuntimeOptions::recall_target, exact search serves
  bool operator==(const IndexRecall&) const = default;
};

}  // namespace prefixd
