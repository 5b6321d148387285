// Loads the indexes stored beside segments and joins them for a prefix. ingest/index_build.h makes
// them.
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
#include "prefixd/ingest.h"
#include "prefixd/partition.h"
#include "runtime/summaries/summaries.h"

namespace prefixd {

// Returns the kinds that the options name, cheapest first.
std::vector<index::IndexKind> BuiltIndexes(const RuntimeOptions& options);
// Returns the kinds that a segment of this length gets. A head whose keys are fewer than an index
// takes, or refused by it, is searched exactly.
std::vector<index::IndexKind> WantedIndexes(const RuntimeOptions& options,
                                            const storage::PrefixInfo& segment);

// Segments shorter than this get no index of this kind.
uint32_t IndexMinTokens(const RuntimeOptions& options, index::IndexKind kind);

// "codes.<layer>.<kv head>" and so on; kExact has none.
std::string IndexBlobName(index::IndexKind kind, uint32_t layer, uint32_t kv_head);
std::string IndexProducer(index::IndexKind kind, Anchors anchors);
// Whether the blob belongs to a kind of index that older builds made and no code reads any more.
bool IsRetiredIndexBlob(std::string_view name);
// Whether any index lies beside a segment, or the recall of one.
bool HasIndexBlobs(const DerivedContext& context, const storage::SegmentId& id);
// Removes all indexes beside a segment, and their recall: of a compressed one, whose tokens they
// name have no rows any more.
Status RemoveIndexBlobs(const DerivedContext& context, const storage::SegmentId& id);
// Returns the tokens of a segment that its indexes cover.
TokenRange IndexedTokens(TokenRange stored, Anchors anchors);

// Whether codes cover at least half of `mid`.
bool HasCodes(const DerivedContext& context, std::span<const SegmentPart> parts, TokenRange mid);

// An index of one segment, tuned; prefixes that have the segment may share it.
struct SegmentIndex {
  storage::SegmentId id;
  std::shared_ptr<const index::KeyIndex> index;
};

// Bundles what loading an index needs of a prefix.
struct IndexSource {
  const DerivedContext& context;
  // Called with a segment whose index proved damaged, foreign or outdated.
  const std::function<void(const storage::SegmentId&)>& rebuild;
  std::span<const SegmentPart> parts;
  std::span<const std::vector<IndexRecall>> recalls;  // [parts], for the kind that is loaded
  TokenRange mid;
  uint32_t layer = 0, kv_head = 0;
  storage::ReadStats* reads = nullptr;
  // Those of this head and kind that another prefix has, and which need not be loaded.
  std::span<const SegmentIndex> loaded = {};
  // Counts the memory of an index that was loaded, as long as it lives.
  std::function<Result<std::shared_ptr<const index::KeyIndex>>(std::unique_ptr<index::KeyIndex>)>
      keep;
};
// What a search of a prefix asks, and what it is made of.
struct PrefixIndex {
  std::shared_ptr<const index::KeyIndex> index;  // null: search exactly
  std::vector<SegmentIndex> parts;
};

// Tokens whose index is missing, or misses the recall target, are searched exactly. An index that
// is damaged, foreign or of another version is never used: the log reports it, and ingest makes it
// again. One that cannot be read now is an error, and stays as it is.

// Joins the codes of all parts that have some into one index.
Result<PrefixIndex> LoadCodes(const IndexSource& source);
// Loads the index of one part.
Result<PrefixIndex> LoadOne(const IndexSource& source, size_t part, index::IndexKind kind);

}  // namespace prefixd
