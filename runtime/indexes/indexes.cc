#include "runtime/indexes/indexes.h"

#include <algorithm>

#include "index/load_index.h"
#include "runtime/derived/unread.h"
#include "storage/io/errors.h"

namespace prefixd {
namespace {

using index::IndexKind;
using Loaded = std::shared_ptr<const index::KeyIndex>;

// Loads the index of one part with its tuned parameters; null where it cannot be used.
Result<Loaded> LoadPart(const IndexSource& source, size_t p, IndexKind kind) {
  const DerivedContext& context = source.context;
  const SegmentPart& part = source.parts[p];
  const auto held = std::ranges::find(source.loaded, part.id, &SegmentIndex::id);
  if (held != source.loaded.end()) return held->index;
  const std::string name = IndexBlobName(kind, source.layer, source.kv_head);
  const auto unsound = [&](const std::string& why) {
    storage::LogWarning(
        "segment " + part.id.ToString() + ": index " + name +
        " is not used and will be made again, its tokens are searched exactly: " + why);
    if (source.rebuild) source.rebuild(part.id);
    return Loaded();
  };
  const auto& recalls = source.recalls[p];
  const auto measured = std::ranges::find_if(recalls, [&](const IndexRecall& r) {
    return r.layer == source.layer && r.kv_head == source.kv_head;
  });
  if (measured != recalls.end() && !measured->used) return Loaded();
  const auto blob =
      context.segments.GetBlob(part.id, name, IndexProducer(kind, context.options.anchors));
  if (!blob.ok() && Unread(blob.error())) return blob.error();
  if (!blob.ok()) {
    return blob.error().code == Code::kNotFound ? Loaded() : unsound(blob.error().message);
  }
  if (source.reads) source.reads->bytes[static_cast<size_t>(Tier::kSsd)] += blob->size();
  auto loaded = index::LoadIndex(*blob);
  if (!loaded.ok()) return unsound(loaded.error().message);
  if ((*loaded)->kind() != kind ||
      (*loaded)->covered() != IndexedTokens(part.stored, context.options.anchors)) {
    return unsound("it is of other tokens");
  }
  if (measured != recalls.end()) {
    const Status set = (*loaded)->SetEffort(static_cast<float>(measured->effort));
    if (!set.ok()) return unsound(set.error().message);
  }
  return source.keep(*std::move(loaded));
}

bool IsIndexBlob(const std::string& name) {
  return name.starts_with("codes.") || name.starts_with("ivf.") || name.starts_with("recall.") ||
         IsRetiredIndexBlob(name);
}

}  // namespace

uint32_t IndexMinTokens(const RuntimeOptions& options, IndexKind kind) {
  switch (kind) {
    case IndexKind::kCodes:
      return options.codes_min_tokens;
    case IndexKind::kIvf:
      return options.ivf_min_tokens;
    case IndexKind::kExact:
      break;
  }
  return 1;
}

std::vector<IndexKind> WantedIndexes(const RuntimeOptions& options,
                                     const storage::PrefixInfo& segment) {
  std::vector<IndexKind> kinds;
  if (segment.n_tokens <= options.anchors.n_sink) return kinds;
  for (const IndexKind kind : BuiltIndexes(options)) {
    if (segment.own_tokens >= std::max(IndexMinTokens(options, kind), 1u)) kinds.push_back(kind);
  }
  return kinds;
}

std::vector<IndexKind> BuiltIndexes(const RuntimeOptions& options) {
  std::vector<IndexKind> kinds;
  if (options.build_codes) kinds.push_back(IndexKind::kCodes);
  if (options.build_ivf) kinds.push_back(IndexKind::kIvf);
  return kinds;
}

std::string IndexBlobName(IndexKind kind, uint32_t layer, uint32_t kv_head) {
  return std::string(index::IndexName(kind)) + "." + std::to_string(layer) + "." +
         std::to_string(kv_head);
}

std::string IndexProducer(IndexKind kind, Anchors anchors) {
  const std::string version = kind == IndexKind::kCodes ? "/3" : "/2";
  return std::string(index::IndexName(kind)) + version + " sinks=" + std::to_string(anchors.n_sink);
}

bool IsRetiredIndexBlob(std::string_view name) {
  return name.starts_with("hnsw.") || name.starts_with("pages.") || name == "recall.hnsw" ||
         name == "recall.pages";
}

bool HasIndexBlobs(const DerivedContext& context, const storage::SegmentId& id) {
  return std::ranges::any_of(context.segments.ListBlobs(id), IsIndexBlob);
}

Status RemoveIndexBlobs(const DerivedContext& context, const storage::SegmentId& id) {
  for (const std::string& name : context.segments.ListBlobs(id)) {
    if (IsIndexBlob(name)) PREFIXD_TRY(context.segments.RemoveBlob(id, name));
  }
  return {};
}

TokenRange IndexedTokens(TokenRange stored, Anchors anchors) {
  return {std::max(stored.begin, anchors.n_sink), std::max(stored.end, anchors.n_sink)};
}

bool HasCodes(const DerivedContext& context, std::span<const SegmentPart> parts, TokenRange mid) {
  uint64_t covered = 0;
  for (const SegmentPart& part : parts) {
    const auto names = context.segments.ListBlobs(part.id);
    const bool has = std::any_of(names.begin(), names.end(), [](const std::string& name) {
      return name.starts_with("codes.");
    });
    if (has) covered += part.used.size();
  }
  return covered > 0 && covered >= mid.size() / 2;
}

Result<PrefixIndex> LoadCodes(const IndexSource& source) {
  PrefixIndex out;
  std::vector<index::IndexPart> indexes;
  for (size_t p = 0; p < source.parts.size(); ++p) {
    PREFIXD_ASSIGN(auto loaded, LoadPart(source, p, IndexKind::kCodes));
    if (!loaded) continue;
    const TokenRange covered = loaded->covered();
    const TokenRange used{std::max(covered.begin, source.mid.begin),
                          std::min({covered.end, source.parts[p].used.end, source.mid.end})};
    if (used.begin >= used.end) continue;
    indexes.push_back({loaded, used});
    out.parts.push_back({source.parts[p].id, std::move(loaded)});
  }
  if (indexes.empty()) return out;
  auto joined = index::JoinCodesIndexes(std::move(indexes));
  if (!joined.ok()) {
    storage::LogWarning("codes of layer " + std::to_string(source.layer) + ", KV head " +
                        std::to_string(source.kv_head) + ": " + joined.error().message);
    return PrefixIndex();
  }
  out.index = *std::move(joined);
  return out;
}

Result<PrefixIndex> LoadOne(const IndexSource& source, size_t part, IndexKind kind) {
  PREFIXD_ASSIGN(auto loaded, LoadPart(source, part, kind));
  if (!loaded) return PrefixIndex();
  return PrefixIndex{loaded, {{source.parts[part].id, loaded}}};
}

}  // namespace prefixd
