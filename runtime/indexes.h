// Indexes over the keys of stored segments: built in the background, stored beside the segment,
// put together for a prefix.
//
// Thread-safety: free functions; concurrent calls are fine.
#pragma once

#include <memory>
#include <span>
#include <string>

#include "index/key_index.h"
#include "runtime/summaries.h"

namespace prefixd {

// "ivf.<layer>.<kv head>", "codes.<layer>.<kv head>"; kExact has none.
std::string IndexBlobName(index::IndexKind kind, uint32_t layer, uint32_t kv_head);
std::string IndexProducer(index::IndexKind kind, Anchors anchors);

// The kinds that the options ask for, of a segment this long. Fewer keys than an index takes, or
// keys that it refuses, leave a head to exact search.
std::vector<index::IndexKind> WantedIndexes(const RuntimeOptions& options,
                                            const storage::PrefixInfo& segment);
// Of every head of the segment in which `prefix` ends; what is stored already stays. Counts heads
// in `progress`.
Status BuildIndexes(const Rooms& rooms, const Model& model, const storage::StoredPrefix& prefix,
                    index::IndexKind kind, WorkProgress& progress);

// Whether codes cover at least half of `mid`.
bool HasCodes(const Rooms& rooms, std::span<const SegmentPart> parts, TokenRange mid);
// The codes of all parts that have some, as one index; null where none can be used. One that is
// damaged or of another version is said in the log and left out: its tokens are searched exactly.
std::unique_ptr<index::KeyIndex> LoadCodes(const Rooms& rooms, std::span<const SegmentPart> parts,
                                           TokenRange mid, uint32_t layer, uint32_t kv_head,
                                           storage::ReadStats* reads);

}  // namespace prefixd
