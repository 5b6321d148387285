// Checks rows before they are kept, and finds the culprit once a score or a sum is not finite.
//
// Kernels do not check their inputs: a NaN or infinity in a query or key makes a score non-finite,
// one in a value an output. Only then are the inputs searched.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "attention/rows/rows.h"
#include "prefixd/result.h"

namespace prefixd {

struct NamedRows {
  std::string_view name;  // as it appears in the message: "retrieved"
  RowsView rows;
};

// Whether none of n elements of rows is NaN or Inf; no alignment is required.
bool AllFinite(DType dtype, const std::byte* bytes, size_t n);
// queries: [n][key_dim]. Names the first query head with a NaN or infinity.
Status CheckQueries(std::span<const float> queries, size_t n, uint32_t key_dim);
// Returns the error for a non-finite score or output: it names the first bad row, or reports that
// finite inputs overflowed.
Error ExplainNonFinite(std::span<const NamedRows> tensors);

}  // namespace prefixd
