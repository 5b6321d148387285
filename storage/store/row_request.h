// Checks what a read of rows asks for, and finds where its bytes go.
//
// Thread-safety: pure functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "prefixd/kv_shape.h"
#include "prefixd/result.h"
#include "storage/read/gather_plan.h"
#include "storage/store/stored_prefix.h"

namespace prefixd::storage {

// kInvalidArgument: the model has no such KV head.
Status CheckRun(const KvGeometry& geometry, uint32_t layer, uint32_t kv_head);
// kInvalidArgument: the ids do not ascend, or leave the prefix.
Status CheckIds(std::span<const uint32_t> ids, uint32_t n_tokens);
// kInvalidArgument: the buffers cannot take so many rows.
Status CheckSink(const RowShape& row, size_t rows, RowPart part, const RowSink& out);
// Returns where the first row's key and value go; `out` has the parts that `part` names.
RowTarget TargetOf(const RowShape& row, const RowSink& out, RowPart part);

}  // namespace prefixd::storage
