// The k-th largest of many numbers.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

namespace prefixd {

// 1 <= k <= x.size(); no NaN. A sample says where to look, so that few of the elements are sorted.
float KthLargest(std::span<const float> x, size_t k, std::vector<float>& scratch);

}  // namespace prefixd
