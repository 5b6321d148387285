// Constants that several files of attention/ use.
#pragma once

#include <cstdint>
#include <limits>

namespace prefixd {

inline constexpr double kInf = std::numeric_limits<double>::infinity();
// Of keys and values, in serialised summaries: more is not a model's.
inline constexpr uint32_t kMaxDim = 1024;

}  // namespace prefixd
