// Names the ways to run a step that step_bench compares.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "prefixd/ledger.h"
#include "prefixd/policy.h"

namespace prefixd::bench {

struct Mode {
  const char* name;
  const char* key;  // in JSON
  StepPolicy policy;
  std::vector<double> ms;  // a layer's step, mean of each round
  Ledger spent;
  double mass = 0;  // share of the attention that is read
  // With codes: ms to read what a layer's step reads, without computing. Where sets are shared it
  // is the mean of searches and of steps that read copies, weighted by their numbers; what the
  // first step to share a set finds and copies is left out.
  std::vector<double> floor_ms;
};

// Returns the modes whose key contains `only`; K is the tokens that a step retrieves.
std::vector<Mode> Modes(uint32_t k, const StepPolicy::Sharing& sharing, std::string_view only);

}  // namespace prefixd::bench
