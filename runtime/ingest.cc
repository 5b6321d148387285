#include "runtime/ingest.h"

#include <algorithm>
#include <set>

#include "index/key_index.h"
#include "runtime/choice.h"
#include "storage/errors.h"

namespace prefixd {
namespace {

// Written last: a segment that has it, from the same producers, is complete.
constexpr const char* kDoneBlob = "ingest";

std::string DoneProducer(const Rooms& rooms, const Model& model) {
  const RuntimeOptions& options = *rooms.options;
  std::string all = "ingest/1 every=" + std::to_string(options.checkpoint_tokens) + "; " +
                    MomentKind(model, options.anchors, options.moment_cross).producer();
  for (const FeatureMapSet& maps : model.maps) {
    all += "; " + PhiKind(model, maps, options.anchors).producer();
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
              WorkProgress& progress) {
  const storage::SegmentId id = prefix.info().id;
  const KvGeometry& geometry = model.spec.geometry;
  const std::string producer = ChoiceProducer(*rooms.options, model);
  auto blob = rooms.storage->GetBlob(id, kQueriesBlob, kQueriesProducer);
  const bool untuned = !blob.ok() && blob.error().code == Code::kNotFound;
  if (untuned || rooms.storage->GetBlob(id, kChoiceBlob, producer).ok()) {
    progress.done += size_t{geometry.n_layers} * geometry.n_kv_heads;
    return {};
  }
  if (!blob.ok()) return std::move(blob).error();
  PREFIXD_ASSIGN(const auto samples, QuerySamples::Deserialize(*blob, geometry));
  PREFIXD_ASSIGN(const auto choices, MeasureChoices(rooms, model, prefix, samples, progress));
  return rooms.storage->PutBlob(id, kChoiceBlob, producer, SerializeChoices(choices));
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
  const size_t heads = size_t{model.spec.geometry.n_layers} * model.spec.geometry.n_kv_heads;
  const size_t checkpoints =
      CheckpointPositions(stored, options.anchors, options.checkpoint_tokens).size();
  progress.total = heads * (checkpoints * (1 + model.maps.size()) + 1 + (ivf ? 1 : 0));

  PREFIXD_TRY(BuildCheckpoints(rooms, MomentKind(model, options.anchors, options.moment_cross),
                               *prefix, segment, options.anchors, options.checkpoint_tokens,
                               progress));
  for (const FeatureMapSet& maps : model.maps) {
    PREFIXD_TRY(BuildCheckpoints(rooms, PhiKind(model, maps, options.anchors), *prefix, segment,
                                 options.anchors, options.checkpoint_tokens, progress));
  }
  PREFIXD_TRY(Choose(rooms, model, *prefix, progress));
  if (ivf) PREFIXD_TRY(BuildIvf(rooms, model, *prefix, progress));
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
  const MomentKind moments(model, options.anchors, options.moment_cross);
  for (uint32_t p : CheckpointPositions(stored, options.anchors, options.checkpoint_tokens)) {
    if (!have.contains(moments.BlobName(p))) return false;
    for (const FeatureMapSet& maps : model.maps) {
      if (!have.contains(PhiKind(model, maps, options.anchors).BlobName(p))) return false;
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
