#include "runtime/ingest.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <optional>
#include <set>

#include "index/key_index.h"
#include "runtime/choice.h"
#include "runtime/kept_summaries.h"
#include "runtime/token_features.h"
#include "storage/errors.h"

namespace prefixd {
namespace {

// Written last: a segment that has it, from the same producers, is complete.
constexpr const char* kDoneBlob = "ingest";

std::string DoneProducer(const Rooms& rooms, const Model& model) {
  const RuntimeOptions& options = *rooms.options;
  std::string all = "ingest/2 every=" + std::to_string(options.checkpoint_tokens) + "; " +
                    SummaryKind::Moments(model, options).producer() +
                    "; of=" + VariantNames(options.estimators) +
                    " clusters=" + std::to_string(options.clusters);
  for (const FeatureMapSet& maps : model.maps) {
    all += "; " + SummaryKind::Phi(model, maps, options).producer();
  }
  all += "; " + ChoiceProducer(options, model);
  if (options.build_ivf) {
    all += "; " + IvfProducer(options.anchors) + " from=" + std::to_string(options.ivf_min_tokens);
  }
  return all;
}

// The tokens of a segment that an index covers.
TokenRange Indexed(const storage::PrefixInfo& info, Anchors anchors) {
  return {std::max(info.n_tokens - info.own_tokens, anchors.n_sink), info.n_tokens};
}

bool WantsIvf(const RuntimeOptions& options, const storage::PrefixInfo& info) {
  return options.build_ivf && info.own_tokens >= std::max(options.ivf_min_tokens, 1u) &&
         info.n_tokens > options.anchors.n_sink;
}

Status BuildIvf(const Rooms& rooms, const Model& model, const storage::StoredPrefix& prefix,
                WorkProgress& progress) {
  const KvGeometry& geometry = model.spec.geometry;
  const RowShape row = geometry.row();
  const Anchors anchors = rooms.options->anchors;
  const TokenRange covered = Indexed(prefix.info(), anchors);
  const std::string producer = IvfProducer(anchors);
  return rooms.pool->ParallelFor(
      size_t{geometry.n_layers} * geometry.n_kv_heads,
      [&](size_t head) -> Status {
        PREFIXD_TRY(progress.Check());
        const uint32_t layer = static_cast<uint32_t>(head) / geometry.n_kv_heads;
        const uint32_t kv_head = static_cast<uint32_t>(head) % geometry.n_kv_heads;
        const std::string name = IvfBlobName(layer, kv_head);
        const bool wanted = geometry.layers[layer].sliding_window == 0 &&
                            !rooms.storage->GetBlob(prefix.info().id, name, producer).ok();
        if (wanted) {
          std::vector<std::byte> bytes(covered.size() * row.bytes());
          PREFIXD_TRY(prefix.ReadRange(layer, kv_head, covered, bytes, nullptr));
          const auto index =
              index::BuildIvfIndex({bytes.data(), covered.size(), row.bytes(), row}, covered, {});
          if (index.ok()) {
            PREFIXD_ASSIGN(const auto serialized, (*index)->Serialize());
            PREFIXD_TRY(rooms.storage->PutBlob(prefix.info().id, name, producer, serialized));
          } else if (index.error().code != Code::kInvalidArgument) {
            return index.error();
          }  // else keys that cannot be clustered: the head is searched exactly
        }
        ++progress.done;
        return {};
      },
      WorkPriority::kBackground);
}

Status Choose(const Rooms& rooms, const Model& model, const storage::StoredPrefix& prefix,
              const QuerySamples* samples, WorkProgress& progress) {
  const storage::SegmentId id = prefix.info().id;
  const std::string producer = ChoiceProducer(*rooms.options, model);
  if (!samples || rooms.storage->GetBlob(id, kChoiceBlob, producer).ok()) {
    progress.done += HeadCount(model);
    return {};
  }
  PREFIXD_ASSIGN(const auto choices, MeasureChoices(rooms, model, prefix, *samples, progress));
  return rooms.storage->PutBlob(id, kChoiceBlob, producer, SerializeChoices(choices));
}

// The prefill's queries, if it gave some.
Result<std::optional<QuerySamples>> LoadSamples(const Rooms& rooms, const Model& model,
                                                const storage::SegmentId& id) {
  const auto blob = rooms.storage->GetBlob(id, kQueriesBlob, kQueriesProducer);
  if (!blob.ok() && blob.error().code == Code::kNotFound) return std::optional<QuerySamples>();
  if (!blob.ok()) return blob.error();
  PREFIXD_ASSIGN(auto samples, QuerySamples::Deserialize(*blob, model.spec.geometry));
  return std::optional(std::move(samples));
}

// How long each stage took, for the log.
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

std::string IvfBlobName(uint32_t layer, uint32_t kv_head) {
  return "ivf." + std::to_string(layer) + "." + std::to_string(kv_head);
}

std::string IvfProducer(Anchors anchors) { return "ivf/1 sinks=" + std::to_string(anchors.n_sink); }

Status IngestSegment(const Rooms& rooms, const Model& model, const storage::SegmentId& id,
                     WorkProgress& progress) {
  const RuntimeOptions& options = *rooms.options;
  PREFIXD_ASSIGN(const auto prefix, rooms.storage->OpenPrefix(id, 0));
  const storage::PrefixInfo& info = prefix->info();
  const TokenRange stored{info.n_tokens - info.own_tokens, info.n_tokens};
  const SegmentPart segment{id, stored, stored};
  const bool ivf = WantsIvf(options, info);
  // Behind the sinks; a segment of sinks alone has nothing to cluster.
  const bool clusters = Clusters(options) && stored.end > options.anchors.n_sink;
  const size_t checkpoints =
      CheckpointPositions(stored, options.anchors, options.checkpoint_tokens).size();
  const size_t features = options.phi_features == "none" ? 0 : model.maps.size();
  progress.total = HeadCount(model) * (checkpoints * (1 + model.maps.size() + (clusters ? 1 : 0)) +
                                       (clusters ? 1 : 0) + features + KeptMoments(options).size() +
                                       1 + (ivf ? 1 : 0));

  Stages stages;
  PREFIXD_TRY(
      BuildCheckpoints(rooms, SummaryKind::Moments(model, options), *prefix, segment, progress));
  stages.Done("moments");
  for (const FeatureMapSet& maps : model.maps) {
    const SummaryKind kind = SummaryKind::Phi(model, maps, options);
    if (kind.stored_features()) {
      PREFIXD_TRY(
          BuildFeatures(rooms, model, maps, kind.feature_format(), *prefix, segment, progress));
    }
    PREFIXD_TRY(BuildCheckpoints(rooms, kind, *prefix, segment, progress));
    stages.Done("phi");
  }
  if (clusters) {
    PREFIXD_ASSIGN(const auto clusterings,
                   BuildClusterings(rooms, model, *prefix, segment, progress));
    PREFIXD_TRY(BuildCheckpoints(rooms, SummaryKind::Clusters(model, clusterings, options), *prefix,
                                 segment, progress));
    stages.Done("clusters");
  }
  PREFIXD_ASSIGN(const auto samples, LoadSamples(rooms, model, id));
  const QuerySamples* queries = samples ? &*samples : nullptr;
  PREFIXD_TRY(BuildKept(rooms, model, *prefix, segment, queries, progress));
  stages.Done("kept");
  PREFIXD_TRY(Choose(rooms, model, *prefix, queries, progress));
  stages.Done("choice");
  if (ivf) {
    PREFIXD_TRY(BuildIvf(rooms, model, *prefix, progress));
    stages.Done("index");
  }
  spdlog::info("segment {}: derived data of {} tokens ready ({})", id.ToString(), stored.size(),
               stages.text());
  PREFIXD_TRY(progress.Check());
  const std::string text = DoneProducer(rooms, model);
  return rooms.storage->PutBlob(id, kDoneBlob, text, std::as_bytes(std::span(text)));
}

bool IngestComplete(const Rooms& rooms, const Model& model, const storage::PrefixInfo& info) {
  const RuntimeOptions& options = *rooms.options;
  if (!rooms.storage->GetBlob(info.id, kDoneBlob, DoneProducer(rooms, model)).ok()) return false;
  const auto names = rooms.storage->ListBlobs(info.id);
  const std::set<std::string> have(names.begin(), names.end());
  const TokenRange stored{info.n_tokens - info.own_tokens, info.n_tokens};
  for (const EstimatorVariant& variant : KeptMoments(options)) {
    if (!have.contains(KeptBlobName(variant))) return false;
  }
  const SummaryKind moments = SummaryKind::Moments(model, options);
  const bool clusters = Clusters(options) && stored.end > options.anchors.n_sink;
  if (clusters && !HasClusterings(rooms, info.id)) return false;
  for (uint32_t p : CheckpointPositions(stored, options.anchors, options.checkpoint_tokens)) {
    if (!have.contains(moments.BlobName(p))) return false;
    if (clusters && !have.contains("clusters." + std::to_string(p))) return false;
    for (const FeatureMapSet& maps : model.maps) {
      if (!have.contains(SummaryKind::Phi(model, maps, options).BlobName(p))) return false;
    }
  }
  for (size_t head = 0; head < HeadCount(model) && options.phi_features != "none"; ++head) {
    const bool kept =
        model.Summarised(static_cast<uint32_t>(head / model.spec.geometry.n_kv_heads)) &&
        stored.end > options.anchors.n_sink;
    for (const FeatureMapSet& maps : model.maps) {
      if (kept && !have.contains(FeaturesBlobName(model, maps, head))) return false;
    }
  }
  return true;
}

void ReportLostQueries(const Rooms& rooms, const storage::SegmentId& id) {
  storage::LogWarning("the sampled queries of prefix " + id.ToString() +
                      " were damaged and cannot be made again: estimators that were chosen by them "
                      "stay, but are not chosen anew until the prompt is removed and put again");
  Status noted = rooms.storage->PutBlob(id, kQueriesLostBlob, kQueriesProducer, {});
  if (!noted.ok()) storage::LogWarning(noted.error().message);
}

Status MarkIncomplete(const Rooms& rooms, const storage::SegmentId& id) {
  return rooms.storage->PutBlob(id, kDoneBlob, "incomplete", {});
}

}  // namespace prefixd
