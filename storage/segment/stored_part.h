// What the rows of a prefix's parts take where they are stored.
//
// Thread-safety: pure functions.
#pragma once

#include <cstdint>
#include <span>

#include "prefixd/kv_shape.h"
#include "prefixd/partition.h"
#include "prefixd/stored_part.h"

namespace prefixd::storage {

// Bytes that the rows of these tokens take where they are stored.
uint64_t RowsBytes(std::span<const StoredPart> parts, const RowShape& row, TokenRange tokens);
// ids: ascending.
uint64_t RowsBytes(std::span<const StoredPart> parts, const RowShape& row,
                   std::span<const uint32_t> ids);

// What a row takes on the average of all parts: what budgets count tokens in (spec §4: `b` is what
// is stored). Of no tokens: as given.
double MeanRowBytes(std::span<const StoredPart> parts, const RowShape& row);

}  // namespace prefixd::storage
