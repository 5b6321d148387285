// Brings what is stored of a segment under the newest key: its blobs, then its file, which is
// copied page by page and swapped in as by every rewriting (new_file.h). Rows, their order and
// their encoding stay as they are.
//
// Thread-safety: may be called concurrently with everything else; of two rewrites of one segment
// one gives up. Errors: kFailedPrecondition without keys; kResourceExhausted when the second copy
// does not fit, kCancelled by `progress`: the file has not changed then, blobs may have.
#pragma once

#include "storage/core/store_core.h"
#include "storage/io/progress.h"

namespace prefixd::storage {

// Implements PrefixStore::Reencrypt.
Result<bool> ReencryptSegment(StoreCore& core, const SegmentId& id, const Progress& progress);

}  // namespace prefixd::storage
