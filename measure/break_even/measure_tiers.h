// Measures what one generated token costs over a stored prompt, tier by tier, through the whole
// store: put, ingest, attach, steps, restore. Keys and values are synthetic, of realistic shape;
// feature maps have random weights.
//
// Thread-safety: one thread at a time.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>

#include "measure/break_even/outcome.h"
#include "prefixd/result.h"

namespace prefixd::bench {

struct TierSpec {
  std::string name;
  bool host = true;  // rows in host memory; false: on the disk alone
  std::string compute = "cpu";
};

struct LengthSpec {
  ModelShape model;
  uint32_t tokens = 16384, layers = 1, steps = 15;
  std::string selector = "auto";
  uint32_t restores = 3;        // beside a first one, which fills the host tier
  bool stored_features = true;  // also measures phi with features of tokens that ingest stored
  std::vector<TierSpec> tiers;
  std::filesystem::path dir;  // empty; left empty
  std::function<void(const std::string&)> progress;
};

// How long the parts took, for estimates: what is done once, and each of the measured tokens.
struct LengthSeconds {
  double storing = 0;  // put and ingest
  double once = 0;     // opening, attaching, restoring
  double step = 0;     // one token in all sessions
  // With the tokens that warm up.
  double Total(uint32_t steps) const { return storing + once + step * (steps + kWarmUp); }
  static constexpr uint32_t kWarmUp = 2;
};

// A tier that cannot be measured is named in `skipped` with the reason; an error when none can.
Result<LengthOutcome> MeasureLength(const LengthSpec& spec, LengthSeconds* seconds);

// k_phi: 1% of the tokens, rounded up; the sweep's largest k is 10 times as much.
uint32_t OnePercent(uint32_t tokens);

}  // namespace prefixd::bench
