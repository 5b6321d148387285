// Watches what the daemon holds, and fits a line through it.
#pragma once

#include <vector>

#include "measure/timing/process.h"

namespace prefixd::soak {

using bench::Holding;
using bench::Look;

// The slope of a least-squares line, in units of y a unit of x; 0 below 3 points.
double Slope(const std::vector<double>& x, const std::vector<double>& y);

}  // namespace prefixd::soak
