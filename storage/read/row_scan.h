// Visits all rows of one (layer, KV head) of a segment in stored order: page after page, in place
// where the host tier has them. It serves readers that do not mind the order of tokens; in the
// reclustered layout the order of tokens is another one, and following it means copying every key
// and every value to a place of its own.
#pragma once

#include <cstdint>

#include "storage/read/page_reader.h"
#include "storage/read/row_access.h"
#include "storage/segment/segment_file.h"

namespace prefixd::storage {

// ScannedRows names the visited rows of a segment: those of its first n_tokens.
struct ScannedRows {
  const SegmentFile& file;
  const RunOrder* order;  // the run's in the reclustered layout, else null
  uint32_t layer, kv_head;
  uint32_t n_tokens;
  RowShape row;  // the row's shape as delivered
};

// Does what StoredPrefix::VisitRows does, for one segment. before: the batches of the prefix's
// segments before it; those of this one are added. Returns the errors of ReadPieces and of `visit`.
Status ScanRows(const ReadServices& services, const ScannedRows& rows, RowViews& room,
                const RowVisitor& visit, VisitPlace& place, uint64_t& before, ReadStats* stats);

}  // namespace prefixd::storage
