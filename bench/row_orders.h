// Orders of rows, judged by the pages that a real model's retrieval would read.
#pragma once

#include <string>
#include <vector>

#include "bench/support/page_reads.h"
#include "index/row_order.h"

namespace prefixd::bench {

// What one read of a page brings.
enum class RowPart : uint8_t {
  kRow,     // key and value adjacent
  kValues,  // values in pages of their own; the exact keys are in memory
};

struct OrderVariant {
  RowPart part = RowPart::kRow;
  uint32_t chunk_tokens = 0;  // 0: in order of arrival
  index::RowLikeness likeness = index::RowLikeness::kHits;
};

struct OrderResult {
  OrderVariant variant;
  std::string name;
  std::vector<PageReads> reads;     // by fraction
  double seconds_per_16k_head = 0;  // of ordering, one core
};

// What background settling is to do, unless measured otherwise.
inline constexpr OrderVariant kSettled = {RowPart::kValues, 16384, index::RowLikeness::kHits};

Result<OrderResult> MeasureOrder(const RetrievalTrace& trace, const OrderVariant& variant);

}  // namespace prefixd::bench
