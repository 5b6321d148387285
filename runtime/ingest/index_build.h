// Indexes over the keys of a stored segment, built in the background, tuned and measured on the
// prefill's own queries, and stored beside the segment.
//
// Thread-safety: free functions; concurrent calls are fine.
#pragma once

#include <vector>

#include "index/search/key_index.h"
#include "runtime/derived/summaries.h"

namespace prefixd {

// Of every head of the segment in which `prefix` ends, and what each finds (index_recall.h). What
// is stored already, and is sound, stays. Counts heads in `progress`.
Status BuildIndexes(const DerivedContext& context, const Model& model,
                    const storage::StoredPrefix& prefix, index::IndexKind kind,
                    WorkProgress& progress);

}  // namespace prefixd
