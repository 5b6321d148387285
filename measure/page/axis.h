// Chooses the range and the ticks of a plot's axis, so that there is a tick at either end.
//
// Thread-safety: plain values and pure functions.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace prefixd::bench {

struct Axis {
  std::string label;         // with its unit
  double low = 0, high = 1;  // of the data
  bool logarithmic = false;  // then low > 0
};

struct Scale {
  double low = 0, high = 1;
  bool logarithmic = false;
  std::vector<std::pair<double, std::string>> ticks;  // ascending; the first is low, the last high

  double Part(double value) const;  // 0 at low, 1 at high
};

// Widens the axis' range to ends with ticks; at most about `max_ticks` of them.
Scale ScaleOf(const Axis& axis, int max_ticks);

}  // namespace prefixd::bench
