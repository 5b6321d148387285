#include "runtime/ingest/index_build.h"

#include <algorithm>
#include <cstdio>
#include <optional>
#include <string>

#include "index/load_index.h"
#include "index/search/tuning.h"
#include "runtime/derived/query_samples.h"
#include "runtime/derived/unread.h"
#include "runtime/indexes/index_recall.h"
#include "runtime/indexes/indexes.h"
#include "runtime/ingest/ingest.h"
#include "storage/io/errors.h"

namespace prefixd {
namespace {

using index::IndexKind;

// Splits the samples: every other sampled token tunes, the rest measures.
struct Halves {
  index::CausalQueries tune, held_out;
};

// Returns empty halves when the put gave no samples.
Halves HalvesOf(const QuerySamples& samples, const KvGeometry& geometry, uint32_t layer,
                uint32_t kv_head) {
  Halves out;
  if (samples.layers.empty()) return out;
  const QuerySamples::Layer& all = samples.layers[layer];
  const LayerShape shape = geometry.layer(layer);
  const size_t token = shape.query_floats();
  const size_t group = size_t{shape.group_size()} * shape.key_dim;
  for (size_t i = 0; i < all.positions.size(); ++i) {
    index::CausalQueries& half = i % 2 == 0 ? out.tune : out.held_out;
    const float* q = all.q.data() + i * token + kv_head * group;
    half.q.insert(half.q.end(), q, q + group);
    half.positions.push_back(all.positions[i]);
  }
  return out;
}

// Returns the samples, or none when they do not verify: untuned indexes are better than none.
Result<QuerySamples> SamplesOf(const DerivedContext& context, const Model& model,
                               const storage::SegmentId& id) {
  const auto blob = context.segments.GetBlob(id, kQueriesBlob, kQueriesProducer);
  if (!blob.ok() && Unread(blob.error())) return blob.error();
  if (!blob.ok()) return QuerySamples{};
  auto samples = QuerySamples::Deserialize(*blob, model.spec.geometry);
  return samples.ok() ? std::move(samples).value() : QuerySamples{};
}

using StoredIndex = std::unique_ptr<index::KeyIndex>;

// Returns the head's stored index; null unless it is sound.
Result<StoredIndex> Stored(const DerivedContext& context, const storage::SegmentId& id,
                           const std::string& name, IndexKind kind, TokenRange covered) {
  const auto blob =
      context.segments.GetBlob(id, name, IndexProducer(kind, context.options.anchors));
  if (!blob.ok() && Unread(blob.error())) return blob.error();
  if (!blob.ok()) return StoredIndex();
  auto loaded = index::LoadIndex(*blob);
  if (!loaded.ok() || (*loaded)->kind() != kind || (*loaded)->covered() != covered) {
    return StoredIndex();
  }
  return loaded;
}

void SayWhichSearchExactly(const storage::SegmentId& id, IndexKind kind, double target,
                           std::span<const IndexRecall> recalls) {
  const auto missed = std::ranges::count(recalls, false, &IndexRecall::used);
  if (missed == 0) return;
  const auto worst = std::ranges::min_element(
      recalls, {}, [](const IndexRecall& r) { return r.queries > 0 ? r.recall : 1.0; });
  char text[160];
  std::snprintf(text, sizeof text,
                "%td of %zu heads will be searched exactly: their index '%s' finds less than %.3f "
                "of what it should (least: %.3f)",
                missed, recalls.size(), index::IndexName(kind).data(), target, worst->recall);
  storage::LogInfo("segment " + id.ToString() + ": " + text);
}

class IndexBuilder {
 public:
  // samples: the prefill's; none where it gave none. measured: before this build.
  IndexBuilder(const DerivedContext& context, const Model& model,
               const storage::StoredPrefix& prefix, IndexKind kind, QuerySamples samples,
               std::vector<IndexRecall> measured)
      : context_(context),
        geometry_(model.spec.geometry),
        prefix_(prefix),
        kind_(kind),
        id_(prefix.info().id),
        covered_(IndexedTokens(
            {prefix.info().n_tokens - prefix.info().own_tokens, prefix.info().n_tokens},
            context.options.anchors)),
        samples_(std::move(samples)),
        measured_(std::move(measured)) {}

  // Builds one head's index; nullopt: the head has no index.
  Result<std::optional<IndexRecall>> Head(uint32_t layer, uint32_t kv_head) const {
    const std::string name = IndexBlobName(kind_, layer, kv_head);
    PREFIXD_ASSIGN(auto built, Stored(context_, id_, name, kind_, covered_));
    const auto before = std::ranges::find_if(
        measured_, [&](const IndexRecall& r) { return r.layer == layer && r.kv_head == kv_head; });
    if (built && before != measured_.end()) return std::optional(*before);
    const RowShape row = geometry_.row(layer), key{row.key_dim, 0, row.dtype};
    std::vector<std::byte> bytes(covered_.size() * key.bytes());
    PREFIXD_TRY(prefix_.ReadRange(layer, kv_head, covered_, storage::RowPart::kKey,
                                  {bytes, key.bytes()}, nullptr));
    const RowsView keys{bytes.data(), covered_.size(), key.bytes(), key};
    const Halves queries = HalvesOf(samples_, geometry_, layer, kv_head);
    if (!built) {
      auto fresh = Build(keys);
      // The index refuses these keys, so the head is searched exactly.
      if (!fresh.ok() && fresh.error().code == Code::kInvalidArgument) {
        return std::optional<IndexRecall>();
      }
      if (!fresh.ok()) return fresh.error();
      built = std::move(fresh).value();
      PREFIXD_ASSIGN(const auto serialized, built->Serialize());
      PREFIXD_TRY(context_.segments.PutBlob(
          id_, name, IndexProducer(kind_, context_.options.anchors), serialized));
    }
    PREFIXD_ASSIGN(const index::MeasuredRecall found,
                   index::Tune(*built, {queries.tune, queries.held_out, geometry_.group_size(layer),
                                        geometry_.layers[layer], keys, kOperatingFraction,
                                        context_.options.recall_target}));
    return std::optional(IndexRecall{
        layer, kv_head, std::string(index::IndexName(kind_)), found.queries, found.k, found.recall,
        found.mass, built->effort(), MeetsTarget(found.queries, found.recall, context_.options)});
  }

  Status Keep(std::vector<std::optional<IndexRecall>> by_head) const {
    std::vector<IndexRecall> recalls;
    for (auto& of_head : by_head) {
      if (of_head) recalls.push_back(*std::move(of_head));
    }
    if (recalls == measured_) return {};
    SayWhichSearchExactly(id_, kind_, context_.options.recall_target, recalls);
    return context_.segments.PutBlob(id_, RecallBlobName(kind_),
                                     RecallProducer(kind_, context_.options),
                                     SerializeRecalls(recalls));
  }

 private:
  Result<std::unique_ptr<index::KeyIndex>> Build(const RowsView& keys) const {
    switch (kind_) {
      case IndexKind::kCodes:
        return index::BuildCodesIndex(keys, covered_);
      case IndexKind::kIvf:
        return index::BuildIvfIndex(keys, covered_, {});
      case IndexKind::kExact:
        break;
    }
    return InvalidArgument("an exact index is not built");
  }

  // Tuning retrieves this share of the keys that a query saw, as steps do at a budget of 1% (spec
  // §4).
  static constexpr double kOperatingFraction = 0.01;

  const DerivedContext& context_;
  const KvGeometry& geometry_;
  const storage::StoredPrefix& prefix_;
  const IndexKind kind_;
  const storage::SegmentId id_;
  const TokenRange covered_;
  const QuerySamples samples_;
  const std::vector<IndexRecall> measured_;
};

}  // namespace

Status BuildIndexes(const DerivedContext& context, const Model& model,
                    const storage::StoredPrefix& prefix, IndexKind kind, WorkProgress& progress) {
  const KvGeometry& geometry = model.spec.geometry;
  PREFIXD_ASSIGN(auto samples, SamplesOf(context, model, prefix.info().id));
  PREFIXD_ASSIGN(auto measured, LoadRecalls(context, prefix.info().id, kind));
  const IndexBuilder builder(context, model, prefix, kind, std::move(samples), std::move(measured));
  std::vector<std::optional<IndexRecall>> recalls(HeadCount(model));
  const Status built = context.pool.ParallelFor(
      recalls.size(),
      [&](size_t head) -> Status {
        PREFIXD_TRY(progress.Check());
        const uint32_t layer = model.heads.layer_of(head), kv_head = model.heads.head_of(head);
        if (geometry.layers[layer].sliding_window == 0) {
          PREFIXD_ASSIGN(recalls[head], builder.Head(layer, kv_head));
        }
        ++progress.done;
        return {};
      },
      WorkPriority::kBackground);
  PREFIXD_TRY(built);
  return builder.Keep(std::move(recalls));
}

}  // namespace prefixd
