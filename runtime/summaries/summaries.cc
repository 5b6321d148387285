#include "runtime/summaries/summaries.h"

#include <algorithm>
#include <charconv>
#include <optional>

#include "runtime/derived/blob_pack.h"
#include "runtime/derived/unread.h"
#include "runtime/summaries/token_features.h"
#include "storage/io/errors.h"

namespace prefixd {
namespace {

std::string AnchorsText(Anchors anchors) {
  return " sinks=" + std::to_string(anchors.n_sink) + " tail=" + std::to_string(anchors.n_tail);
}

// Returns the positions of this kind's checkpoints beside a segment, descending.
std::vector<uint32_t> StoredPositions(const DerivedContext& context, const SummaryKind& kind,
                                      const storage::SegmentId& id) {
  std::vector<uint32_t> positions;
  const std::string& prefix = kind.prefix();
  for (const std::string& name : context.segments.ListBlobs(id)) {
    uint32_t position = 0;
    const char* end = name.data() + name.size();
    if (!name.starts_with(prefix)) continue;
    const auto parsed = std::from_chars(name.data() + prefix.size(), end, position);
    if (parsed.ec == std::errc() && parsed.ptr == end) positions.push_back(position);
  }
  std::sort(positions.rbegin(), positions.rend());
  return positions;
}

// Treats a checkpoint that is damaged, or by another producer, as missing: summaries can always be
// derived again from rows. Damage is logged. One that cannot be read now is an error.
Result<std::optional<SummarySet>> LoadCheckpoint(const DerivedContext& context,
                                                 const SummaryKind& kind,
                                                 const storage::SegmentId& id, uint32_t position,
                                                 std::vector<storage::ReadStats>* reads) {
  const std::string name = kind.BlobName(position);
  auto blob = context.segments.GetBlob(id, name, kind.producer());
  Result<SummarySet> read =
      blob.ok() ? UnpackSummaries(
                      kind.model(), kind.producer(),
                      [&](size_t head) {
                        return kind.Has(head) ? std::optional(kind.spec(head)) : std::nullopt;
                      },
                      *blob, reads)
                : Result<SummarySet>(blob.error());
  if (read.ok()) return std::optional(std::move(read).value());
  if (Unread(read.error())) return std::move(read).error();
  if (read.error().code != Code::kNotFound) {
    storage::LogWarning("segment " + id.ToString() + ": checkpoint " + name +
                        " is built again: " + read.error().message);
  }
  return std::optional<SummarySet>();
}

// A run of tokens of one segment.
struct SegmentRange {
  storage::SegmentId id;
  TokenRange range;
};

// Adds the rows of one head in `run` to `to`, piece by piece.
Status AddRange(const DerivedContext& context, const SummaryKind& kind,
                const storage::StoredPrefix& prefix, size_t head, const SegmentRange& run,
                EstimatorSummary& to, storage::ReadStats* reads, const WorkProgress* progress) {
  const HeadIndex& heads = kind.model().heads;
  const uint32_t layer = heads.layer_of(head), kv_head = heads.head_of(head);
  const RowShape row = kind.model().spec.geometry.row(layer);
  std::optional<TokenFeatures> features;
  if (const FeatureMapSet* maps = kind.stored_features()) {
    uint64_t loaded = 0;
    PREFIXD_ASSIGN(features, LoadFeatures(context, kind.model(), *maps, kind.feature_format(),
                                          run.id, head, &loaded));
    if (reads) reads->bytes[static_cast<size_t>(Tier::kSsd)] += loaded;
  }
  const auto scratch = context.scratch.Acquire();
  for (uint32_t at = run.range.begin; at < run.range.end;) {
    if (progress) PREFIXD_TRY(progress->Check());
    const TokenRange piece{at, std::min(run.range.end, RunEnd(prefix.parts(), at, kRunTokens))};
    const auto bytes = Scratch::Take(scratch->rows, piece.size() * row.bytes());
    PREFIXD_TRY(prefix.ReadRange(layer, kv_head, piece, bytes, reads));
    const RowsView rows{bytes.data(), piece.size(), row.bytes(), row};
    if (features) {
      to.AddFeatures(rows, features->LogPhi(piece), features->Alone(piece));
    } else {
      to.Add(rows);
    }
    at = piece.end;
  }
  return {};
}

}  // namespace

EstimatorSpec EmptySpec(const Model& model, size_t head) {
  const LayerShape shape = model.spec.geometry.layer(model.heads.layer_of(head));
  return {EstimatorKind::kNone, shape.key_dim, shape.value_dim};
}

std::vector<uint32_t> CheckpointPositions(TokenRange segment, Anchors anchors,
                                          uint32_t checkpoint_tokens) {
  std::vector<uint32_t> positions;
  const uint32_t first = std::max(segment.begin, anchors.n_sink);
  const auto add = [&](uint64_t position) {
    if (position > first && position <= segment.end) positions.push_back(uint32_t(position));
  };
  for (uint64_t p = uint64_t{segment.begin} + checkpoint_tokens; p < segment.end;
       p += checkpoint_tokens) {
    add(p);
  }
  if (segment.end > anchors.n_tail) add(segment.end - anchors.n_tail);
  add(segment.end);
  std::sort(positions.begin(), positions.end());
  positions.erase(std::unique(positions.begin(), positions.end()), positions.end());
  return positions;
}

SummaryKind SummaryKind::Moments(const Model& model, const RuntimeOptions& options) {
  bool cross = false, covariance = false;
  for (const EstimatorVariant& v : options.estimators) {
    cross |= v.kind == EstimatorKind::kMoment && v.rank > 0;
    covariance |= v.kind == EstimatorKind::kMoment && v.covariance;
  }
  SummaryKind kind(model, "moments.",
                   "moments/2" + AnchorsText(options.anchors) + " cross=" + (cross ? "1" : "0") +
                       " cov=" + (covariance ? "1" : "0"));
  for (size_t head = 0; head < HeadCount(model); ++head) {
    EstimatorSpec spec = EmptySpec(model, head);
    spec.kind = EstimatorKind::kMoment;
    spec.cross = cross;
    spec.covariance = covariance;
    kind.specs_.push_back(spec);
  }
  return kind;
}

SummaryKind SummaryKind::Phi(const Model& model, const FeatureMapSet& maps,
                             const RuntimeOptions& options) {
  SummaryKind kind(model, "phi." + std::to_string(maps.length) + ".",
                   "phi/3" + AnchorsText(options.anchors) + " from=" + options.phi_features +
                       " maps=" + maps.digest);
  if (auto format = FeatureFormatFromName(options.phi_features); format.ok()) {
    kind.features_ = *format;
  }
  kind.maps_ = &maps;
  for (size_t head = 0; head < HeadCount(model); ++head) {
    EstimatorSpec spec = EmptySpec(model, head);
    spec.kind = EstimatorKind::kPhi;
    spec.phi_k = &maps.phi_k[head];
    kind.specs_.push_back(spec);
  }
  return kind;
}

SummaryKind SummaryKind::Clusters(const Model& model, const std::vector<Clustering>& clusterings,
                                  const RuntimeOptions& options) {
  // The blob gathers what centroids keep, of which a scan reads a part, where any are configured.
  EstimatorKind most = EstimatorKind::kScan;
  for (const EstimatorVariant& v : options.estimators) {
    if (v.kind == EstimatorKind::kCentroid) most = v.kind;
  }
  SummaryKind kind(model, "clusters.",
                   "clusters/2" + AnchorsText(options.anchors) +
                       " n=" + std::to_string(options.clusters) +
                       " as=" + std::string(EstimatorName(most)));
  for (size_t head = 0; head < HeadCount(model); ++head) {
    EstimatorSpec spec = EmptySpec(model, head);
    spec.kind = most;
    spec.clustering = &clusterings[head];
    kind.specs_.push_back(spec);
  }
  return kind;
}

Result<SummarySet> SummaryKind::Empty() const {
  SummarySet set;
  set.reserve(specs_.size());
  for (size_t head = 0; head < specs_.size(); ++head) {
    PREFIXD_ASSIGN(auto summary,
                   EstimatorSummary::Create(Has(head) ? specs_[head] : EmptySpec(model_, head)));
    set.push_back(std::move(summary));
  }
  return set;
}

SummaryKind SummaryKind::Only(HeadSet heads) && {
  only_ = std::move(heads);
  return std::move(*this);
}

uint64_t SummaryKind::MemoryBytes() const {
  // Heads of one shape take as much.
  std::optional<std::pair<uint32_t, uint32_t>> shape;
  uint64_t bytes = 0, of_head = 0;
  for (size_t head = 0; head < specs_.size(); ++head) {
    if (!Has(head)) continue;
    const std::pair own{specs_[head].key_dim, specs_[head].value_dim};
    if (shape != own) {
      const auto one = EstimatorSummary::Create(specs_[head]);
      of_head = one.ok() ? one->memory_bytes() : 0;
      shape = own;
    }
    bytes += of_head;
  }
  return bytes;
}

std::vector<std::byte> PackSummaries(const Model& model, const std::string& producer,
                                     const SummarySet& summaries) {
  std::vector<std::vector<std::byte>> entries(summaries.size());
  for (size_t head = 0; head < summaries.size(); ++head) {
    if (model.Summarised(model.heads.layer_of(head))) {
      entries[head] = summaries[head].Serialize(producer);
    }
  }
  return PackBlob(entries);
}

Result<SummarySet> UnpackSummaries(const Model& model, const std::string& producer,
                                   const SpecOfHead& spec, std::span<const std::byte> blob,
                                   std::vector<storage::ReadStats>* reads) {
  PREFIXD_ASSIGN(const auto entries, UnpackBlob(blob, HeadCount(model)));
  SummarySet summaries;
  summaries.reserve(entries.size());
  for (size_t head = 0; head < entries.size(); ++head) {
    const auto kept = model.Summarised(model.heads.layer_of(head)) ? spec(head) : std::nullopt;
    PREFIXD_ASSIGN(auto summary, kept
                                     ? EstimatorSummary::Deserialize(*kept, producer, entries[head])
                                     : EstimatorSummary::Create(EmptySpec(model, head)));
    summaries.push_back(std::move(summary));
    if (reads && kept)
      (*reads)[head].bytes[static_cast<size_t>(Tier::kSsd)] += entries[head].size();
  }
  return summaries;
}

Status BuildCheckpoints(const DerivedContext& context, const SummaryKind& kind,
                        const storage::StoredPrefix& prefix, const SegmentPart& segment,
                        WorkProgress& progress) {
  const RuntimeOptions& options = context.options;
  const size_t heads = HeadCount(kind.model());
  PREFIXD_ASSIGN(SummarySet sums, kind.Empty());
  uint32_t at = std::max(segment.stored.begin, options.anchors.n_sink);
  for (uint32_t position :
       CheckpointPositions(segment.stored, options.anchors, options.checkpoint_tokens)) {
    PREFIXD_TRY(progress.Check());
    PREFIXD_ASSIGN(auto stored, LoadCheckpoint(context, kind, segment.id, position, nullptr));
    if (stored) {
      sums = std::move(*stored);
      at = position;
      progress.done += heads;
      continue;
    }
    const auto extend = [&](size_t head) -> Status {
      if (kind.model().Summarised(kind.model().heads.layer_of(head))) {
        PREFIXD_TRY(AddRange(context, kind, prefix, head, {segment.id, {at, position}}, sums[head],
                             nullptr, &progress));
      }
      ++progress.done;
      return {};
    };
    PREFIXD_TRY(context.pool.ParallelFor(heads, extend, WorkPriority::kBackground));
    PREFIXD_TRY(context.segments.PutBlob(segment.id, kind.BlobName(position), kind.producer(),
                                         PackSummaries(kind.model(), kind.producer(), sums)));
    at = position;
  }
  return {};
}

Result<SummarySet> AssembleSummaries(const DerivedContext& context, const SummaryKind& kind,
                                     const storage::StoredPrefix& prefix,
                                     const std::vector<SegmentPart>& parts, TokenRange mid,
                                     uint64_t max_added, WorkPriority priority,
                                     std::vector<storage::ReadStats>* reads) {
  PREFIXD_ASSIGN(SummarySet sums, kind.Empty());
  std::vector<SegmentRange> to_add;  // behind each segment's checkpoint
  for (const SegmentPart& part : parts) {
    const uint32_t begin = std::max(part.used.begin, mid.begin);
    const uint32_t end = std::min(part.used.end, mid.end);
    if (begin >= end) continue;
    uint32_t at = begin;
    for (uint32_t position : StoredPositions(context, kind, part.id)) {
      if (position > end || position <= begin) continue;
      PREFIXD_ASSIGN(const auto stored, LoadCheckpoint(context, kind, part.id, position, reads));
      if (!stored) continue;
      for (size_t head = 0; head < sums.size(); ++head) {
        PREFIXD_TRY(sums[head].Merge((*stored)[head]));
      }
      at = position;
      break;
    }
    if (end - at > max_added) {
      return Error{Code::kFailedPrecondition,
                   "the summaries of tokens " + std::to_string(at) + ".." + std::to_string(end) +
                       " are not built yet; wait until the prefix is ready (WaitReady) or attach "
                       "with estimator \"none\""};
    }
    if (end > at) to_add.push_back({part.id, {at, end}});
  }
  if (to_add.empty()) return sums;
  const auto add = [&](size_t head) -> Status {
    if (!kind.Has(head)) return {};
    for (const SegmentRange& range : to_add) {
      PREFIXD_TRY(AddRange(context, kind, prefix, head, range, sums[head],
                           reads ? &(*reads)[head] : nullptr, nullptr));
    }
    return {};
  };
  PREFIXD_TRY(context.pool.ParallelFor(sums.size(), add, priority));
  return sums;
}

}  // namespace prefixd
