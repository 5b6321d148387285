// The infinity of scores and log-sum-exps.
#pragma once

#include <limits>

namespace prefixd::testing {

inline constexpr float kInf = std::numeric_limits<float>::infinity();

}  // namespace prefixd::testing
