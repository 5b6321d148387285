// Holds what `prefixctl bench break-even` measured, and computes its map.
//
// Thread-safety: plain values and pure functions.
#pragma once

#include <algorithm>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "measure/disk/medium.h"
#include "measure/map/amortised.h"
#include "measure/map/trade_off.h"
#include "measure/models/model_shape.h"
#include "measure/timing/statistics.h"

namespace prefixd::bench {

// Milliseconds per generated token over all layers of the model: those that were measured, scaled.
// Select, load and compute are thread time, summed over KV heads; wall is what the decoder waits.
struct TokenMs {
  Spread select, load, compute, wall;
};

struct TopKPoint {
  uint32_t gamma = 1, k = 0;
  TokenMs ms;
};

struct CompletionPoint {
  std::string name;           // "moment", "phi recomputed", "phi stored"
  TokenMs ms;                 // of the whole step
  Spread estimate;            // of compute: beyond Top-K at the same k, pair by pair
  double summary_tokens = 0;  // token-equivalents of the summary per layer and KV head
};

// What a decoder waits for once: until the session is there, and for its first token, beyond what
// later tokens take.
struct FirstUse {
  double attach_ms = 0, first_ms = 0;
  double once_ms(double later_ms) const { return attach_ms + std::max(0.0, first_ms - later_ms); }
};

struct TierOutcome {
  std::string name;  // "rows in host memory", "rows on the SSD"; on CUDA with its name behind it
  bool host = true;
  std::string compute = "cpu";
  std::vector<TopKPoint> topk;
  std::vector<CompletionPoint> completion;
  // In a store just opened, with an estimate by moments and without one; attaching is scaled to all
  // layers like the rest, which is at most what it takes.
  FirstUse completed, selected;
  Spread restore_ms;  // all rows of all layers into the engine's own cache
  // One token of full attention behind a restore: over the engine's own arrays; on a device
  // prefixd's own step over rows in host memory. 0: not measured.
  Spread full_ms;
  double amplification = 0;  // bytes read from the SSD over bytes of rows, Top-K at k_phi; 0: none
};

struct LengthOutcome {
  uint32_t tokens = 0, k_phi = 0, layers = 0;  // layers: measured ones
  double put_seconds = 0, ingest_seconds = 0;  // of the measured layers
  double stored_bytes = 0;                     // rows and what is made from them, same layers
  std::vector<TierOutcome> tiers;
  std::vector<std::string> skipped;  // what could not be measured of it, and why
};

struct BreakEvenOutcome {
  ModelShape model;
  uint32_t steps = 0;
  std::string selector;
  std::vector<LengthOutcome> lengths;
  double prefill_tokens_per_second = 0;  // as given, or 0
  double gemm_flops = 0;                 // measured, where no rate is given
  std::vector<std::string> skipped;      // what could not be measured, and why
  Medium medium;
  double other_work = 0;  // of the machine, while it was measured

  double PrefillSeconds(uint64_t n) const;
  // Whether the prefill's time belongs beside this tier: what is not given is measured on this
  // processor, and says nothing of a device.
  bool ComparesPrefill(const TierOutcome& tier) const {
    return prefill_tokens_per_second > 0 || tier.compute == "cpu";
  }
};

// The tiers of each backend, the processor's first; each begins with rows in host memory, from
// which the map's xi counts. A backend without that tier is left out.
std::vector<std::vector<const TierOutcome*>> ByBackend(const LengthOutcome& length);
std::string BackendName(const TierOutcome& tier);  // "the CPU", "the CUDA device"

// The map of a tier: medians, milliseconds per token.
TradeOff MapOf(const LengthOutcome& length, const TierOutcome& tier);
CompletedTimes CompletedOf(const TierOutcome& tier, const CompletionPoint& point);
// Reads of `tier` over those of host memory by the same backend, at k_phi: its place on the axis of
// xi; 0 where there is none.
double XiOf(const LengthOutcome& length, const TierOutcome& tier);
// The completion whose loading and computing take least; selection is the same for all.
const CompletionPoint* BestCompletion(const TierOutcome& tier);
// What an answer costs: from `tier` by completion, by Top-K at the paper's 1.8 times as many
// tokens, by restoring and attending fully, and by computing the prompt again; what was not
// measured is left out.
std::vector<Way> WaysOf(const BreakEvenOutcome& outcome, const LengthOutcome& length,
                        const TierOutcome& tier);

inline constexpr double kMapXis[] = {1, 2, 5, 10, 20, 50, 100};
inline constexpr double kContourShares[] = {1, 0.5, 0.25, 0.1};
inline constexpr double kPaperGamma = 1.8;  // where Top-K was as good as completion at 1% in [RC]

nlohmann::json OutcomeJson(const BreakEvenOutcome& outcome);

}  // namespace prefixd::bench
