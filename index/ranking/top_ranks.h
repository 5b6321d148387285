// The k-th largest of many numbers.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

namespace prefixd {

// 1 <= k <= x.size(); no NaN. Found by counting, in linear time whatever the numbers; `scratch`
// must not hold x.
float KthLargest(std::span<const float> x, size_t k, std::vector<float>& scratch);

}  // namespace prefixd
