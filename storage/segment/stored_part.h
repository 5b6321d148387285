// Computes the stored bytes of rows of a prefix's parts.
//
// Thread-safety: pure functions.
#pragma once

#include <cstdint>
#include <span>

#include "prefixd/kv_shape.h"
#include "prefixd/partition.h"
#include "prefixd/stored_part.h"

namespace prefixd::storage {

// Returns the stored bytes of the rows of these tokens.
uint64_t RowsBytes(std::span<const StoredPart> parts, const RowShape& row, TokenRange tokens);
// ids: ascending.
uint64_t RowsBytes(std::span<const StoredPart> parts, const RowShape& row,
                   std::span<const uint32_t> ids);

// Returns the mean stored bytes of a row over all parts: the unit in which budgets count tokens
// (docs/mathematics.md: `b` is the stored size). Without tokens: the row as given.
double MeanRowBytes(std::span<const StoredPart> parts, const RowShape& row);

}  // namespace prefixd::storage
