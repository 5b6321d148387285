// Runs numbered cycles in forked workers, batch by batch. A cycle follows from the seed and its
// number (and, as far as threads matter, from the moment), whatever ran before it.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "tests/reliability/harness/child.h"
#include "tests/reliability/workload/journal.h"
#include "tests/reliability/workload/truth.h"

namespace prefixd::storage::reliability {

// A Cycle reports counts and violations. It runs in a worker process.
using Cycle = std::function<void(uint64_t number, uint64_t seed, Journal& report)>;

// A count whose name begins so belongs to one named point.
inline const std::string kAtPoint = "killed at ";

struct Totals {
  uint64_t cycles = 0;
  std::map<std::string, uint64_t> counts;
  std::vector<std::string> violations;

  void Add(const std::vector<Event>& events);
  // Returns "12 puts acknowledged, ..., kills at 42 different points".
  static std::string Text(const std::map<std::string, uint64_t>& counts);
};

struct CyclesPlan {
  uint64_t first = 0, end = 0;  // numbers of the cycles
  uint64_t seed = 0;            // the seed of a cycle follows from this and its number
  uint32_t workers = 2;
  uint64_t batch = 100;
  uint64_t max_violations = 1;  // stop at the end of the batch that reaches this many
  // Called after every cycle; true: stop soon.
  std::function<bool()> stop;
  // Called after each batch with the number of the first cycle that was not run, and the totals so
  // far.
  std::function<void(uint64_t next, const Totals&)> progress;
};

Totals RunCycles(const CyclesPlan& plan, const Cycle& cycle);
uint64_t SeedOf(uint64_t seed, uint64_t number);

// Reads the journal that a child left: applies its events to the truth and passes counts and
// violations on. True: a crash point is among them.
bool Absorb(Journal& from, Truth& truth, Journal& report, const std::string& where);

}  // namespace prefixd::storage::reliability
