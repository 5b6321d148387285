#include "runtime/indexes.h"

#include <algorithm>

#include "runtime/ingest.h"
#include "runtime/query_samples.h"
#include "storage/errors.h"

namespace prefixd {
namespace {

using index::IndexKind;

// The tokens of a segment that an index covers.
TokenRange Indexed(TokenRange stored, Anchors anchors) {
  return {std::max(stored.begin, anchors.n_sink), std::max(stored.end, anchors.n_sink)};
}

// The sampled queries of one group, [samples][group][key_dim]; empty: the put gave none.
std::vector<float> QueriesOf(const QuerySamples& samples, const KvGeometry& geometry,
                             uint32_t layer, uint32_t kv_head) {
  std::vector<float> out;
  if (samples.layers.empty()) return out;
  const std::vector<float>& all = samples.layers[layer].q;
  const size_t token = size_t{geometry.n_q_heads} * geometry.key_dim;
  const size_t group = size_t{geometry.group_size()} * geometry.key_dim;
  for (size_t at = kv_head * group; at < all.size(); at += token) {
    out.insert(out.end(), all.begin() + ptrdiff_t(at), all.begin() + ptrdiff_t(at + group));
  }
  return out;
}

// Without samples codes are untuned; samples that do not verify are no reason to fail.
QuerySamples SamplesOf(const Rooms& rooms, const Model& model, const storage::SegmentId& id) {
  const auto blob = rooms.storage->GetBlob(id, kQueriesBlob, kQueriesProducer);
  if (!blob.ok()) return {};
  auto samples = QuerySamples::Deserialize(*blob, model.spec.geometry);
  return samples.ok() ? std::move(samples).value() : QuerySamples{};
}

}  // namespace

std::string IndexBlobName(IndexKind kind, uint32_t layer, uint32_t kv_head) {
  return std::string(index::IndexName(kind)) + "." + std::to_string(layer) + "." +
         std::to_string(kv_head);
}

std::string IndexProducer(IndexKind kind, Anchors anchors) {
  return std::string(index::IndexName(kind)) + "/1 sinks=" + std::to_string(anchors.n_sink);
}

std::vector<IndexKind> WantedIndexes(const RuntimeOptions& options,
                                     const storage::PrefixInfo& segment) {
  std::vector<IndexKind> kinds;
  if (segment.n_tokens <= options.anchors.n_sink) return kinds;
  const auto wanted = [&](bool build, uint32_t min_tokens, IndexKind kind) {
    if (build && segment.own_tokens >= std::max(min_tokens, 1u)) kinds.push_back(kind);
  };
  wanted(options.build_codes, options.codes_min_tokens, IndexKind::kCodes);
  wanted(options.build_ivf, options.ivf_min_tokens, IndexKind::kIvf);
  return kinds;
}

Status BuildIndexes(const Rooms& rooms, const Model& model, const storage::StoredPrefix& prefix,
                    IndexKind kind, WorkProgress& progress) {
  const KvGeometry& geometry = model.spec.geometry;
  const RowShape row = geometry.row();
  const Anchors anchors = rooms.options->anchors;
  const storage::PrefixInfo& info = prefix.info();
  const TokenRange covered = Indexed({info.n_tokens - info.own_tokens, info.n_tokens}, anchors);
  const std::string producer = IndexProducer(kind, anchors);
  const QuerySamples samples = SamplesOf(rooms, model, info.id);
  const auto build = [&](const RowsView& keys, uint32_t layer, uint32_t kv_head) {
    if (kind == IndexKind::kIvf) return index::BuildIvfIndex(keys, covered, {});
    const std::vector<float> queries = QueriesOf(samples, geometry, layer, kv_head);
    return index::BuildCodesIndex(keys, covered, {queries});
  };
  return rooms.pool->ParallelFor(
      size_t{geometry.n_layers} * geometry.n_kv_heads,
      [&](size_t head) -> Status {
        PREFIXD_TRY(progress.Check());
        const uint32_t layer = static_cast<uint32_t>(head) / geometry.n_kv_heads;
        const uint32_t kv_head = static_cast<uint32_t>(head) % geometry.n_kv_heads;
        const std::string name = IndexBlobName(kind, layer, kv_head);
        const bool wanted = geometry.layers[layer].sliding_window == 0 &&
                            !rooms.storage->GetBlob(info.id, name, producer).ok();
        if (wanted) {
          const RowShape keys{row.key_dim, 0, row.dtype};
          std::vector<std::byte> bytes(covered.size() * keys.bytes());
          PREFIXD_TRY(prefix.ReadRange(layer, kv_head, covered, storage::RowPart::kKey,
                                       {bytes, keys.bytes()}, nullptr));
          const auto built =
              build({bytes.data(), covered.size(), keys.bytes(), keys}, layer, kv_head);
          if (built.ok()) {
            PREFIXD_ASSIGN(const auto serialized, (*built)->Serialize());
            PREFIXD_TRY(rooms.storage->PutBlob(info.id, name, producer, serialized));
          } else if (built.error().code != Code::kInvalidArgument) {
            return built.error();
          }  // else keys that it does not take: the head is searched exactly
        }
        ++progress.done;
        return {};
      },
      WorkPriority::kBackground);
}

bool HasCodes(const Rooms& rooms, std::span<const SegmentPart> parts, TokenRange mid) {
  uint64_t covered = 0;
  for (const SegmentPart& part : parts) {
    const auto names = rooms.storage->ListBlobs(part.id);
    const bool has = std::any_of(names.begin(), names.end(), [](const std::string& name) {
      return name.starts_with("codes.");
    });
    if (has) covered += part.used.size();
  }
  return covered > 0 && covered >= mid.size() / 2;
}

std::unique_ptr<index::KeyIndex> LoadCodes(const Rooms& rooms, std::span<const SegmentPart> parts,
                                           TokenRange mid, uint32_t layer, uint32_t kv_head,
                                           storage::ReadStats* reads) {
  const Anchors anchors = rooms.options->anchors;
  const std::string name = IndexBlobName(IndexKind::kCodes, layer, kv_head);
  std::vector<index::IndexPart> indexes;
  const auto left_out = [&](const SegmentPart& part, const std::string& why) {
    storage::LogWarning("segment " + part.id.ToString() + ": index " + name +
                        " is not used, its tokens are searched exactly: " + why);
  };
  for (const SegmentPart& part : parts) {
    const auto blob =
        rooms.storage->GetBlob(part.id, name, IndexProducer(IndexKind::kCodes, anchors));
    if (!blob.ok()) {
      if (blob.error().code != Code::kNotFound) left_out(part, blob.error().message);
      continue;
    }
    if (reads) reads->bytes[static_cast<size_t>(Tier::kSsd)] += blob->size();
    auto loaded = index::LoadIndex(*blob);
    if (!loaded.ok()) {
      left_out(part, loaded.error().message);
      continue;
    }
    if ((*loaded)->kind() != IndexKind::kCodes ||
        (*loaded)->covered() != Indexed(part.stored, anchors)) {
      left_out(part, "it is of other tokens");
      continue;
    }
    const TokenRange covered = (*loaded)->covered();
    const TokenRange used{std::max(covered.begin, mid.begin),
                          std::min({covered.end, part.used.end, mid.end})};
    if (used.begin < used.end) indexes.push_back({std::move(loaded).value(), used});
  }
  if (indexes.empty()) return nullptr;
  auto joined = index::JoinCodesIndexes(std::move(indexes));
  if (!joined.ok()) {
    storage::LogWarning("index " + name + ": " + joined.error().message);
    return nullptr;
  }
  return std::move(joined).value();
}

}  // namespace prefixd
