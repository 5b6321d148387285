// Builds indexes over the keys of a stored segment in the background, tunes and measures them on
// the prefill's own queries, and stores them beside the segment.
//
// Thread-safety: free functions; concurrent calls are fine.
#pragma once

#include <vector>

#include "index/search/key_index.h"
#include "runtime/summaries/summaries.h"

namespace prefixd {

// Builds the indexes of every head of the segment in which `prefix` ends, and measures their recall
// (index_recall.h). Sound indexes that are stored already stay. Counts heads in `progress`.
Status BuildIndexes(const DerivedContext& context, const Model& model,
                    const storage::StoredPrefix& prefix, index::IndexKind kind,
                    WorkProgress& progress);

}  // namespace prefixd
