// The indexes that lie beside stored segments, put together for a prefix. How they are made:
// ingest/index_build.h.
//
// Thread-safety: free functions; concurrent calls are fine.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "index/search/key_index.h"
#include "prefixd/types.h"
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

// "codes.<layer>.<kv head>" and so on; kExact has none.
std::string IndexBlobName(index::IndexKind kind, uint32_t layer, uint32_t kv_head);
std::string IndexProducer(index::IndexKind kind, Anchors anchors);
// Whether a blob is of a kind of index that older builds made and nothing reads any more.
bool IsRetiredIndexBlob(std::string_view name);
// The tokens of a segment that its indexes cover.
TokenRange IndexedTokens(TokenRange stored, Anchors anchors);

// Whether codes cover at least half of `mid`.
bool HasCodes(const DerivedContext& context, std::span<const SegmentPart> parts, TokenRange mid);

// What loading an index needs to know of a prefix.
struct IndexSource {
  const DerivedContext& context;
  // Told of a segment whose index turned out not to be sound.
  const std::function<void(const storage::SegmentId&)>& rebuild;
  std::span<const SegmentPart> parts;
  std::span<const std::vector<IndexRecall>> recalls;  // [parts], of the kind that is loaded
  TokenRange mid;
  uint32_t layer = 0, kv_head = 0;
  storage::ReadStats* reads = nullptr;
};

// Tokens whose index is not there, or misses the recall target, are searched exactly. An index that
// is damaged, foreign or of another version is never used: it is said in the log, and made again.

// The codes of all parts that have some, as one index; null where none can be used.
std::unique_ptr<index::KeyIndex> LoadCodes(const IndexSource& source);
// The index of one part; null where it cannot be used.
std::unique_ptr<index::KeyIndex> LoadOne(const IndexSource& source, size_t part,
                                         index::IndexKind kind);

}  // namespace prefixd
