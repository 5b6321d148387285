// How much the indexes of a segment find, measured when they are built and stored beside them: one
// blob of JSON for all heads of a kind, because people look at it too.
//
// Thread-safety: free functions; concurrent calls are fine.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "index/search/key_index.h"
#include "prefixd/result.h"
#include "prefixd/types.h"
#include "runtime/derived/summaries.h"

namespace prefixd {

std::string RecallBlobName(index::IndexKind kind);  // "recall.codes"
// Tuning depends on the target; what is stored under another is measured again.
std::string RecallProducer(index::IndexKind kind, const RuntimeOptions& options);

// Untuned indexes serve: nothing says that they should not.
bool MeetsTarget(uint32_t queries, double recall, const RuntimeOptions& options);

std::vector<std::byte> SerializeRecalls(std::span<const IndexRecall> recalls);
// kCorrupt for anything else than what SerializeRecalls wrote.
Result<std::vector<IndexRecall>> DeserializeRecalls(std::span<const std::byte> bytes,
                                                    const RuntimeOptions& options);
// Of all heads of the segment that have an index; empty when none was measured (yet).
std::vector<IndexRecall> LoadRecalls(const DerivedContext& context, const storage::SegmentId& id,
                                     index::IndexKind kind);

}  // namespace prefixd
