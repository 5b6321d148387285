// Rewrites stored segments in the background: into the reclustered layout, and two small ones into
// one. The new file is written and synced beside the old one, then one catalog commit swaps it in;
// readers that have the old file open read on in it. A crash in between leaves one of the two,
// whole.
//
// Thread-safety: may be called concurrently with everything else; of two rewrites of one segment
// one gives up. Errors: kResourceExhausted when the second copy does not fit, kCancelled by
// `progress`; nothing has changed then.
#pragma once

#include "storage/core/store_core.h"
#include "storage/store/prefix_store.h"

namespace prefixd::storage {

// These implement PrefixStore::Recluster and ::Compact.
Status ReclusterSegment(StoreCore& core, const SegmentId& id, const ReclusterOptions& options);
Result<PrefixInfo> CheckCompactionOf(const StoreCore& core, const SegmentId& leaf,
                                     uint32_t max_tokens);
Result<SegmentId> CompactSegment(StoreCore& core, const SegmentId& leaf, uint32_t max_tokens,
                                 std::span<const NewBlob> blobs);

}  // namespace prefixd::storage
