#include "runtime/ingest/ingest.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <optional>
#include <set>

#include "runtime/derived/unread.h"
#include "runtime/indexes/index_recall.h"
#include "runtime/indexes/indexes.h"
#include "runtime/ingest/choice.h"
#include "runtime/ingest/index_build.h"
#include "runtime/summaries/materialised_summaries.h"
#include "runtime/summaries/token_features.h"
#include "storage/io/errors.h"

namespace prefixd {
namespace {

// This blob is written last: a segment that has it, from the same producers, is complete.
constexpr const char* kDoneBlob = "ingest";

std::string DoneProducer(const DerivedContext& context, const Model& model) {
  const RuntimeOptions& options = context.options;
  std::string all = "ingest/3 every=" + std::to_string(options.checkpoint_tokens) + "; " +
                    SummaryKind::Moments(model, options).producer() +
                    "; of=" + VariantNames(options.estimators) +
                    " clusters=" + std::to_string(options.clusters);
  for (const FeatureMapSet& maps : model.maps) {
    all += "; " + SummaryKind::Phi(model, maps, options).producer();
  }
  all += "; " + ChoiceProducer(options, model);
  for (const index::IndexKind kind : BuiltIndexes(options)) {
    all += "; " + RecallProducer(kind, options) +
           " from=" + std::to_string(IndexMinTokens(options, kind));
  }
  return all;
}

Status Choose(const DerivedContext& context, const Model& model,
              const storage::StoredPrefix& prefix, const QuerySamples* samples,
              WorkProgress& progress) {
  const storage::SegmentId id = prefix.info().id;
  const std::string producer = ChoiceProducer(context.options, model);
  const auto stored =
      samples ? context.segments.GetBlob(id, kChoiceBlob, producer) : std::vector<std::byte>{};
  if (!stored.ok() && Unread(stored.error())) return stored.error();
  if (stored.ok()) {
    progress.done += HeadCount(model);
    return {};
  }
  PREFIXD_ASSIGN(const auto choices, MeasureChoices(context, model, prefix, *samples, progress));
  return context.segments.PutBlob(id, kChoiceBlob, producer, SerializeChoices(choices));
}

// Returns the sampled queries of the prefill, if the put gave some.
Result<std::optional<QuerySamples>> LoadSamples(const DerivedContext& context, const Model& model,
                                                const storage::SegmentId& id) {
  const auto blob = context.segments.GetBlob(id, kQueriesBlob, kQueriesProducer);
  if (!blob.ok() && blob.error().code == Code::kNotFound) return std::optional<QuerySamples>();
  if (!blob.ok()) return blob.error();
  PREFIXD_ASSIGN(auto samples, QuerySamples::Deserialize(*blob, model.spec.geometry));
  return std::optional(std::move(samples));
}

// Times each stage, for the log.
class Stages {
 public:
  void Done(const char* stage) {
    const auto now = std::chrono::steady_clock::now();
    char text[64];
    std::snprintf(text, sizeof text, "%s%s %.1f s", text_.empty() ? "" : ", ", stage,
                  std::chrono::duration<double>(now - last_).count());
    text_ += text;
    last_ = now;
  }
  const std::string& text() const { return text_; }

 private:
  std::string text_;
  std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
};

bool Clusters(const RuntimeOptions& options) {
  return std::ranges::any_of(options.estimators,
                             [](const EstimatorVariant& v) { return v.clustered(); });
}

}  // namespace

namespace {

// About what making a segment's derived data takes at one time: the sums of all heads with what is
// packed of them, or on each thread the keys of a head with what is made of them.
uint64_t IngestBytes(const DerivedContext& context, const Model& model, uint32_t own_tokens) {
  const uint64_t sums = SummaryKind::Moments(model, context.options).MemoryBytes();
  uint64_t row = 0;
  for (uint32_t l = 0; l < model.spec.geometry.n_layers; ++l) {
    row = std::max<uint64_t>(row, model.spec.geometry.row(l).bytes());
  }
  const uint64_t keys = own_tokens * row;
  return 3 * sums + context.pool.threads() * 2 * keys;
}

// No more than a quarter of all; kResourceExhausted with a time to retry while there is none.
Result<MemoryCharge> TakeMemory(const DerivedContext& context, uint64_t bytes) {
  if (!context.memory) return MemoryCharge();
  return context.memory->Shared().Take(MemoryKind::kIngest,
                                       std::min(bytes, context.memory->capacity() / 4));
}

}  // namespace

Status IngestSegment(const DerivedContext& context, const Model& model,
                     const storage::SegmentId& id, WorkProgress& progress) {
  const RuntimeOptions& options = context.options;
  PREFIXD_ASSIGN(const auto prefix, context.segments.OpenPrefix(id, 0));
  for (const std::string& name : context.segments.ListBlobs(id)) {
    if (IsRetiredIndexBlob(name)) PREFIXD_TRY(context.segments.RemoveBlob(id, name));
  }
  const storage::PrefixInfo& info = prefix->info();
  // All was made before rows went, which it cannot be made without.
  if (info.kept_rows > 0) return RemoveIndexBlobs(context, id);
  const TokenRange stored{info.n_tokens - info.own_tokens, info.n_tokens};
  const SegmentPart segment{id, stored, stored};
  PREFIXD_ASSIGN(const MemoryCharge memory,
                 TakeMemory(context, IngestBytes(context, model, info.own_tokens)));
  const std::vector<index::IndexKind> indexes = WantedIndexes(options, info);
  // Clustering starts behind the sinks; a segment of sinks alone has no keys to cluster.
  const bool clusters = Clusters(options) && stored.end > options.anchors.n_sink;
  const size_t checkpoints =
      CheckpointPositions(stored, options.anchors, options.checkpoint_tokens).size();
  const size_t features = options.phi_features == "none" ? 0 : model.maps.size();
  progress.total = HeadCount(model) * (checkpoints * (1 + model.maps.size() + (clusters ? 1 : 0)) +
                                       (clusters ? 1 : 0) + features +
                                       MaterialisedMoments(options).size() + 1 + indexes.size());

  Stages stages;
  PREFIXD_TRY(
      BuildCheckpoints(context, SummaryKind::Moments(model, options), *prefix, segment, progress));
  stages.Done("moments");
  for (const FeatureMapSet& maps : model.maps) {
    const SummaryKind kind = SummaryKind::Phi(model, maps, options);
    if (kind.stored_features()) {
      PREFIXD_TRY(
          BuildFeatures(context, model, maps, kind.feature_format(), *prefix, segment, progress));
    }
    PREFIXD_TRY(BuildCheckpoints(context, kind, *prefix, segment, progress));
    stages.Done("phi");
  }
  if (clusters) {
    PREFIXD_ASSIGN(const auto clusterings,
                   BuildClusterings(context, model, *prefix, segment, progress));
    PREFIXD_TRY(BuildCheckpoints(context, SummaryKind::Clusters(model, clusterings, options),
                                 *prefix, segment, progress));
    stages.Done("clusters");
  }
  PREFIXD_ASSIGN(const auto samples, LoadSamples(context, model, id));
  const QuerySamples* queries = samples ? &*samples : nullptr;
  PREFIXD_TRY(BuildMaterialised(context, model, *prefix, segment, queries, progress));
  stages.Done("kept");
  for (const index::IndexKind kind : indexes) {
    PREFIXD_TRY(BuildIndexes(context, model, *prefix, kind, progress));
    stages.Done(index::IndexName(kind).data());
  }
  // The choice tries what a search by codes tells.
  PREFIXD_TRY(Choose(context, model, *prefix, queries, progress));
  stages.Done("choice");
  storage::LogInfo("segment " + id.ToString() + ": derived data of " +
                   std::to_string(stored.size()) + " tokens ready (" + stages.text() + ")");
  PREFIXD_TRY(progress.Check());
  const std::string text = DoneProducer(context, model);
  return context.segments.PutBlob(id, kDoneBlob, text, std::as_bytes(std::span(text)));
}

bool IngestComplete(const DerivedContext& context, const Model& model,
                    const storage::PrefixInfo& info) {
  const RuntimeOptions& options = context.options;
  if (info.kept_rows > 0) return !HasIndexBlobs(context, info.chain.back());
  if (!context.segments.GetBlob(info.id, kDoneBlob, DoneProducer(context, model)).ok())
    return false;
  const auto names = context.segments.ListBlobs(info.id);
  if (std::ranges::any_of(names, IsRetiredIndexBlob)) return false;
  const std::set<std::string> have(names.begin(), names.end());
  const TokenRange stored{info.n_tokens - info.own_tokens, info.n_tokens};
  for (const EstimatorVariant& variant : MaterialisedMoments(options)) {
    if (!have.contains(MaterialisedBlobName(variant))) return false;
  }
  const SummaryKind moments = SummaryKind::Moments(model, options);
  const bool clusters = Clusters(options) && stored.end > options.anchors.n_sink;
  if (clusters && !HasClusterings(context, info.id)) return false;
  for (uint32_t p : CheckpointPositions(stored, options.anchors, options.checkpoint_tokens)) {
    if (!have.contains(moments.BlobName(p))) return false;
    if (clusters && !have.contains("clusters." + std::to_string(p))) return false;
    for (const FeatureMapSet& maps : model.maps) {
      if (!have.contains(SummaryKind::Phi(model, maps, options).BlobName(p))) return false;
    }
  }
  for (size_t head = 0; head < HeadCount(model) && options.phi_features != "none"; ++head) {
    const bool kept =
        model.Summarised(model.heads.layer_of(head)) && stored.end > options.anchors.n_sink;
    for (const FeatureMapSet& maps : model.maps) {
      if (kept && !have.contains(FeaturesBlobName(model, maps, head))) return false;
    }
  }
  return true;
}

void ReportLostQueries(const DerivedContext& context, const storage::SegmentId& id) {
  storage::LogWarning("the sampled queries of prefix " + id.ToString() +
                      " were damaged and cannot be made again: estimators that were chosen by them "
                      "stay, but are not chosen anew until the prompt is removed and put again");
  Status noted = context.segments.PutBlob(id, kQueriesLostBlob, kQueriesProducer, {});
  if (!noted.ok()) storage::LogWarning(noted.error().message);
}

Status MarkIncomplete(const DerivedContext& context, const storage::SegmentId& id) {
  return context.segments.PutBlob(id, kDoneBlob, "incomplete", {});
}

}  // namespace prefixd
