// Rewriting of stored segments in the background, after their ingest: small ones are merged with
// what they continue, larger ones settled (storage/store/prefix_store.h). Both only move rows: a
// prefix answers the same before, during and after.
#pragma once

#include <optional>
#include <vector>

#include "runtime/derived/derived_context.h"
#include "runtime/derived/models.h"
#include "runtime/work/work_progress.h"
#include "storage/store/prefix_store.h"

namespace prefixd {

// What the rewriting of a segment led to.
struct Rewritten {
  bool settled = false;
  // Set when the segment was merged: the new one, whose derived data is to be made anew.
  std::optional<storage::SegmentId> merged;
  std::vector<storage::SegmentId> gone;  // segments that the merged one replaced
};

// Does what is worth doing for one segment whose ingest is complete; kCancelled when stopped.
// A segment that is in use or does not fit on the disk twice is left as it is: no error.
Result<Rewritten> RewriteSegment(storage::PrefixStore& store, const DerivedContext& context,
                                 const Model& model, const storage::SegmentId& id,
                                 WorkProgress& progress);

}  // namespace prefixd
