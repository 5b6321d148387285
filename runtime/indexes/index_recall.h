// Stores the recall of a segment's indexes, which is measured when they are built. One JSON blob
// holds all heads of a kind, because people read it too.
//
// Thread-safety: free functions; concurrent calls are fine.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "index/search/key_index.h"
#include "prefixd/ingest.h"
#include "prefixd/result.h"
#include "runtime/summaries/summaries.h"

namespace prefixd {

std::string RecallBlobName(index::IndexKind kind);  // "recall.codes"
// The producer names the recall target, because tuning depends on it: a recall stored under another
// target is measured again.
std::string RecallProducer(index::IndexKind kind, const RuntimeOptions& options);

// An untuned index meets the target: no measurement speaks against it.
bool MeetsTarget(uint32_t queries, double recall, const RuntimeOptions& options);

std::vector<std::byte> SerializeRecalls(std::span<const IndexRecall> recalls);
// kCorrupt for anything but what SerializeRecalls wrote.
Result<std::vector<IndexRecall>> DeserializeRecalls(std::span<const std::byte> bytes,
                                                    const RuntimeOptions& options);
// Returns the recalls of all heads of the segment that have an index; empty when none was measured
// yet.
Result<std::vector<IndexRecall>> LoadRecalls(const DerivedContext& context,
                                             const storage::SegmentId& id, index::IndexKind kind);

}  // namespace prefixd
