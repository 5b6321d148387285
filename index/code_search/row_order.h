// In which order to store the rows of one KV head so that tokens retrieved together share pages.
//
// Thread-safety: pure functions.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "attention/rows/rows.h"

namespace prefixd::index {

struct RowOrderOptions {
  uint32_t rows_per_page = 32;
  // [n][key_dim] float32: a sample of the queries of the head, or of its group. Borrowed. With it,
  // keys are alike when these queries score them alike; without, when they lie close together,
  // which reads fewer pages on the model in models/ (row_order_bench).
  std::span<const float> queries;
};

// order[place] is the row to be stored there: a permutation of [0, keys.count). Rows that are
// alike fill the same page, pages that are alike are neighbours, rows ascend inside a page. The
// same input gives the same order. O(n log n) for given dimensions.
//   keys: values are not looked at; elements that are not finite count as zero
std::vector<uint32_t> ClusterOrder(const RowsView& keys, const RowOrderOptions& options);

}  // namespace prefixd::index
