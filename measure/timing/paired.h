// Measures a figure beside its floor in turns (ours, floor, ours, floor, ...), so that other work
// on the machine slows both alike.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "measure/timing/statistics.h"
#include "prefixd/result.h"

namespace prefixd::bench {

// Holds one run of either side: work per second, and its CPU time.
struct Sample {
  double rate = 0;
  double cpu_seconds_per_gb = 0;
};

struct Paired {
  std::string name, unit, floor_name;
  double unit_divisor = 1;             // the table shows rates divided by it
  Spread ours, floor, ratio;           // ratio: ours / floor of each pair
  double ours_cpu = 0, floor_cpu = 0;  // medians, CPU seconds per GB
};

using Measurement = std::function<Result<Sample>()>;

// Measures `pairs` pairs after a first one that does not count. Without a `floor` ours is measured
// alone, and floor and ratio stay 0.
inline Result<Paired> MeasurePairs(Paired what, uint32_t pairs, const Measurement& ours,
                                   const Measurement& floor) {
  std::vector<double> a, b, ratio, a_cpu, b_cpu;
  for (uint32_t i = 0; i <= pairs; ++i) {
    PREFIXD_ASSIGN(const Sample mine, ours());
    Sample theirs;
    if (floor) {
      PREFIXD_ASSIGN(theirs, floor());
    }
    if (i == 0) continue;
    a.push_back(mine.rate);
    a_cpu.push_back(mine.cpu_seconds_per_gb);
    if (!floor) continue;
    b.push_back(theirs.rate);
    ratio.push_back(mine.rate / theirs.rate);
    b_cpu.push_back(theirs.cpu_seconds_per_gb);
  }
  what.ours = Summarise(std::move(a));
  what.floor = Summarise(std::move(b));
  what.ratio = Summarise(std::move(ratio));
  what.ours_cpu = Summarise(std::move(a_cpu)).median;
  what.floor_cpu = Summarise(std::move(b_cpu)).median;
  return what;
}

}  // namespace prefixd::bench
