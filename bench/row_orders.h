// Orders of rows, judged by the pages that a real model's retrieval would read.
#pragma once

#include <string>
#include <vector>

#include "bench/support/page_reads.h"
#include "runtime/store/local_store.h"
#include "storage/store/prefix_store.h"

namespace prefixd::bench {

struct OrderVariant {
  // kRow: key and value adjacent. kValue: values in pages of their own and read alone, as when the
  // exact keys are in memory.
  storage::RowPart part = storage::RowPart::kRow;
  uint32_t chunk_tokens = 0;  // 0: in order of arrival
  bool by_scores = false;     // keys are alike when the put's sampled queries score them alike
};

struct OrderResult {
  OrderVariant variant;
  std::string name;
  std::vector<PageReads> reads;     // by fraction
  double seconds_per_16k_head = 0;  // of ordering, one core
};

// The settled layout of storage/segment/segment_layout.h as it is by default.
inline const OrderVariant kSettled = {storage::RowPart::kValue,
                                      RuntimeOptions{}.settle_chunk_tokens, false};

Result<OrderResult> MeasureOrder(const RetrievalTrace& trace, const OrderVariant& variant);

}  // namespace prefixd::bench
