// Says what a step of a session may read (docs/policy.md).
//
// Thread-safety: plain values and pure functions.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "prefixd/estimator_variant.h"
#include "prefixd/result.h"

namespace prefixd {

enum class StepMode : uint8_t {
  kFull = 0,      // exact attention over everything
  kAnchors = 1,   // sinks and tail only
  kRetrieve = 2,  // anchors, retrieved Top-K and an estimate of the remainder
};
std::string_view StepModeName(StepMode mode);  // "full", "anchors", "retrieve"
Result<StepMode> StepModeFromName(std::string_view name);

// A policy decides what a step may read. It is given at attach and may be replaced between steps.
struct StepPolicy {
  StepMode mode = StepMode::kRetrieve;
  // kAuto: the estimator that ingest chose for each layer and KV head on held-out queries of the
  // prefill; without such queries the moment estimator ("untuned"). It travels as a name of
  // estimator_variant.h.
  EstimatorVariant estimator = EstimatorKind::kAuto;
  double budget = 0.02;           // fraction of the prefix per step (docs/mathematics.md)
  std::optional<uint32_t> k;      // fixed K instead of a budget
  uint32_t l_gen = 1;             // generated tokens that share the summary's cost
  std::string selector = "auto";  // "auto", "exact", "codes", "ivf"
  // Steps share retrieved sets ([PrHS]; runtime/step/shared_sets.h): within a block, steps whose
  // queries are alike retrieve once. The tokens that dilation adds are read beyond `k`; the plan of
  // a `budget` includes them, so that the budget holds.
  struct Sharing {
    uint32_t block = 1;       // steps, at most 256; 1: every step retrieves
    double similarity = 0.9;  // cosine of the queries above which they share a set
    uint32_t dilation = 1;    // neighbours to either side of the best third; at most 16
    // The first step of a block shares the previous block's set too, if its query is like the one
    // that retrieved the set. With blocks of 1 a step shares the previous step's set.
    bool across = false;
    bool on() const { return block > 1 || across; }
    bool operator==(const Sharing&) const = default;
  };
  Sharing sharing;
  // Rows are prefetched into the host tier for a head's next step, behind all other reading
  // (runtime/prefix/prefetcher.h): the tokens behind and before those that the last step retrieved,
  // nearest first. Prefetch changes times and bytes read, never results.
  struct Prefetch {
    uint32_t forward = 0, back = 0;  // tokens, at most 64; both 0: off
    // Bounds what is prefetched for a step of all layers, in equal parts for its heads; a tenth of
    // the host tier bounds it, too. 4 to 65536.
    uint32_t max_mib = 64;
    bool on() const { return forward > 0 || back > 0; }
    bool operator==(const Prefetch&) const = default;
  };
  Prefetch prefetch;
  // Of a session's own tokens that have moved to the store (AttachSpec::own_memory_tokens), each KV
  // head keeps the rows of so many in memory: those that a retention policy ranks highest whenever
  // tokens move. Steps of mode retrieve attend to them exactly and do not read their rows; `budget`
  // and `k` count none of them, but those among the `k` best that are retained are not read again.
  // In other modes, and in sessions that keep all own tokens in memory, it has no effect.
  struct Retain {
    uint32_t tokens = 0;  // of each KV head; 0: none. At most 4096
    // By what the last 16 queries attend to: "local" (the mean), "snapkv" (that, pooled over
    // neighbours), "global" (its largest decayed share at any move), "global-sum", "global-mean"
    // (the same, added up, or averaged), "gkv" (global, less what doubles other keys), "h2o" (what
    // they gave at all moves, added up); "tova": by the last query alone; "kvpop": by trained
    // scorers (RuntimeOptions::scorers); "window": the newest.
    std::string by = "local";
    bool on() const { return tokens > 0; }
    bool operator==(const Retain&) const = default;
  };
  Retain retain;
  // Spreads a step's tokens over layers and heads by the attention mass that each is estimated to
  // miss, instead of evenly; the total never grows.
  bool adaptive = false;
  // Spreads the tokens of `budget` over layers and heads by what the prefill's queries were
  // measured to lose, instead of evenly; the total never grows.
  bool spread = true;
  // Fills StepInfo::missing: each query head's missing mass, certified where the cut is exact.
  bool report_missing = false;
  // Names the estimator for single heads, in place of `estimator`.
  struct Fixed {
    uint32_t layer = 0, kv_head = 0;
    EstimatorVariant estimator = EstimatorKind::kNone;
    bool operator==(const Fixed&) const = default;
  };
  std::vector<Fixed> fixed;
  bool operator==(const StepPolicy&) const = default;
};

}  // namespace prefixd
