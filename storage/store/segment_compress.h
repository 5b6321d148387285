// Rewrites the segment in which a prefix ends with some of its rows alone: each KV head keeps rows
// of as many tokens, and which is stored beside them. The new file is written and synced beside the
// old one, then one catalog commit swaps it in, and the old file is removed: a crash leaves one of
// the two, whole. What lies beside the segment (summaries, queries) was made of all rows and stays.
//
// Thread-safety: may be called concurrently with everything else; of two rewrites of one segment
// one gives up, and so does this one when the prefix is opened or continued meanwhile.
#pragma once

#include "storage/core/store_core.h"
#include "storage/store/prefix_store.h"

namespace prefixd::storage {

// As PrefixStore::CheckCompressible. Waits a moment for whoever has the segment for a moment alone.
Status CheckCompressible(StoreCore& core, const SegmentId& id);

// As PrefixStore::Compress.
Status CompressSegment(StoreCore& core, const SegmentId& id, const CompressOptions& options);

// As PrefixStore::SizesOf.
Result<SegmentSizes> CompressedSizes(const StoreCore& core, const SegmentId& id,
                                     uint32_t kept_rows);

}  // namespace prefixd::storage
