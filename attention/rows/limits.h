// Defines constants that several files of attention/ use.
#pragma once

#include <cstdint>
#include <limits>

namespace prefixd {

inline constexpr double kInf = std::numeric_limits<double>::infinity();
// Bounds keys and values in serialised summaries: no model has larger ones.
inline constexpr uint32_t kMaxDim = 1024;

}  // namespace prefixd
