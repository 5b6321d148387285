// Rewrites stored segments in the background, after their ingest: compacts small ones with the
// segments that they continue, and reclusters larger ones (storage/store/prefix_store.h). Both only
// move rows: a prefix answers the same before, during and after.
#pragma once

#include <optional>
#include <vector>

#include "runtime/derived/derived_context.h"
#include "runtime/derived/models.h"
#include "runtime/work/work_progress.h"
#include "storage/store/prefix_store.h"

namespace prefixd {

// Reports what the rewriting of a segment did.
struct Rewritten {
  bool reclustered = false;
  // Set when the segment was compacted: the new segment, whose derived data must be made.
  std::optional<storage::SegmentId> compacted;
  std::vector<storage::SegmentId> gone;  // segments that the compacted one replaced
};

// Makes the rewrites that pay off for one segment whose ingest is complete; kCancelled when
// stopped. A segment that is in use, or does not fit on the disk twice, stays unchanged: no error.
Result<Rewritten> RewriteSegment(storage::PrefixStore& store, const DerivedContext& context,
                                 const Model& model, const storage::SegmentId& id,
                                 WorkProgress& progress);

// Reclusters one segment, and compacts one with the segment that it continues, on request: also
// where it would not pay off. The errors are those of storage/store/prefix_store.h.
Status ReclusterNow(storage::PrefixStore& store, const DerivedContext& context, const Model& model,
                    const storage::SegmentId& id, WorkProgress& progress);
Result<storage::SegmentId> CompactNow(storage::PrefixStore& store, const DerivedContext& context,
                                      const Model& model, const storage::SegmentId& leaf,
                                      WorkProgress& progress);

}  // namespace prefixd
