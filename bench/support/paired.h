// A figure beside its floor, measured in turns (ours, floor, ours, floor, ...), so that a machine
// that others use too slows both alike.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "bench/support/statistics.h"
#include "prefixd/result.h"

namespace prefixd::bench {

// One run of either side: work per second, and the CPU it took.
struct Sample {
  double rate = 0;
  double cpu_seconds_per_gb = 0;
};

struct Paired {
  std::string name, unit, floor_name;
  double unit_divisor = 1;             // rates are shown divided by it
  Spread ours, floor, ratio;           // ratio: of the pairs, ours / floor
  double ours_cpu = 0, floor_cpu = 0;  // medians, CPU seconds per GB
};

using Measurement = std::function<Result<Sample>()>;

// `pairs` pairs after one of each that does not count.
inline Result<Paired> MeasurePairs(Paired what, uint32_t pairs, const Measurement& ours,
                                   const Measurement& floor) {
  std::vector<double> a, b, ratio, a_cpu, b_cpu;
  for (uint32_t i = 0; i <= pairs; ++i) {
    PREFIXD_ASSIGN(const Sample mine, ours());
    PREFIXD_ASSIGN(const Sample theirs, floor());
    if (i == 0) continue;
    a.push_back(mine.rate);
    b.push_back(theirs.rate);
    ratio.push_back(mine.rate / theirs.rate);
    a_cpu.push_back(mine.cpu_seconds_per_gb);
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
