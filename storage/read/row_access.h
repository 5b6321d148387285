// Declares which part of rows a reader reads, where it goes or lies, and what the read cost.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "prefixd/kv_shape.h"
#include "prefixd/ledger.h"
#include "prefixd/result.h"
#include "prefixd/row_ref.h"

namespace prefixd::storage {

// ReadStats counts the physical reads of one call, by tier: bytes count everything read, pages only
// the requested ones.
struct ReadStats {
  std::array<uint64_t, kTierCount> bytes{};
  uint64_t pages_ssd = 0, pages_host = 0;
  uint64_t prefetch_used_bytes = 0;  // prefetched pages in the tier, used now for the first time
  ReadStats& operator+=(const ReadStats& o);
};

// The part of a row that a reader reads. Where keys are in memory already, values alone are half
// the bytes, and in the reclustered layout half the pages.
enum class RowPart : uint8_t { kRow, kKey, kValue };
inline size_t PartBytes(const RowShape& row, RowPart part) {
  return (part == RowPart::kValue ? 0 : row.key_bytes()) +
         (part == RowPart::kKey ? 0 : row.value_bytes());
}

// A RowSink is where rows go, in the geometry's dtype: item i at bytes[i * stride]. A whole row is
// its key followed by its value, or, where `values` is given, a key in `bytes` and a value there.
struct RowSink {
  std::span<std::byte> bytes;
  size_t stride = 0;
  std::span<std::byte> values = {};
  size_t value_stride = 0;
};

// Says what becomes of the pages that a run of rows is read from.
enum class RangeUse : uint8_t {
  kShared,   // other readers may use them too: the host tier takes what it has free room for
  kOwn,      // the reader keeps the bytes: the tier gives what it has and takes nothing
  kOwnLater  // kOwn at the lowest priority: no step waits for it
};

// RowsInPlace are rows read in place: verified, and unchanged while this lives, even after the
// prefix is closed.
struct RowsInPlace {
  std::vector<RowRef> rows;  // in the order of the ids
  // The memory that holds all rows: one region per tenant, mappable read-only through `region_fd`
  // (-1: it cannot be passed on) by the process that receives it. Valid as long as `hold`.
  uint64_t region_id = 0;  // unique among the regions of a store
  std::span<const std::byte> region;
  int region_fd = -1;
  std::shared_ptr<const void> hold;  // releasing it releases the rows
};

// What copies runs of rows from where they lie; otherwise as RowsInPlace.
struct RunsInPlace {
  std::vector<RowCopy> copies;
  uint64_t region_id = 0;
  std::span<const std::byte> region;
  int region_fd = -1;
  std::shared_ptr<const void> hold;
};

// A run of rows of a KV head, and where its reader wants them.
struct WantedRun {
  uint32_t kv_head = 0;
  RowSink out;
};

// RowViews are rows for the duration of a step: in place in the host tier, or in memory of this
// view's own (encoded rows, rows larger than a page, pages the tier has no room for, and those that
// a visit finds missing). Keep one and reuse it: its memory only grows. Release `hold` soon: until
// then the pages cannot be evicted.
struct RowViews {
  std::vector<RowRef> rows;  // in the order of the ids; parts not requested stay unchanged
  std::vector<std::byte> own;
  std::shared_ptr<const void> hold;
};

// A RowVisitor receives rows in place, valid until it returns; an error ends the visit.
using RowVisitor = std::function<Status(std::span<const RowRef>)>;

// How far a visit of a run's rows has come, so that another one goes on behind it.
struct VisitPlace {
  uint64_t batches = 0;  // those that were visited, from the first
};

}  // namespace prefixd::storage
