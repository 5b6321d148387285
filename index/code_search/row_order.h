// In which order to store the rows of one KV head so that tokens retrieved together share pages.
//
// Thread-safety: pure functions.
#pragma once

#include <cstdint>
#include <vector>

#include "attention/rows/rows.h"

namespace prefixd::index {

// order[place] is the row to be stored there: a permutation of [0, keys.count). Rows that are
// alike (their keys lie close together) fill the same page, pages that are alike are neighbours,
// rows ascend inside a page. The same input gives the same order. O(n log n) for given dimensions.
//   keys: values are not looked at; elements that are not finite count as zero
std::vector<uint32_t> ClusterOrder(const RowsView& keys, uint32_t rows_per_page);

}  // namespace prefixd::index
