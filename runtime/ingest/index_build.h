// Indexes over the keys of a stored segment, built in the background, tuned and measured on the
// prefill's own queries, and stored beside the segment.
//
// Thread-safety: free functions; concurrent calls are fine.
#pragma once

#include <vector>

#include "index/search/key_index.h"
#include "runtime/derived/summaries.h"

namespace prefixd {

// The kinds that the options ask for, cheapest first.
std::vector<index::IndexKind> BuiltIndexes(const RuntimeOptions& options);
// Those of a segment this long. Fewer keys than an index takes, or
// keys that it refuses, leave a head to exact search.
std::vector<index::IndexKind> WantedIndexes(const RuntimeOptions& options,
                                            const storage::PrefixInfo& segment);

// Segments shorter than this get no such index.
uint32_t IndexMinTokens(const RuntimeOptions& options, index::IndexKind kind);

// Of every head of the segment in which `prefix` ends, and what each finds (index_recall.h). What
// is stored already, and is sound, stays. Counts heads in `progress`.
Status BuildIndexes(const Rooms& rooms, const Model& model, const storage::StoredPrefix& prefix,
                    index::IndexKind kind, WorkProgress& progress);

}  // namespace prefixd
