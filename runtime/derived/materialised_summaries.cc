#include "runtime/derived/materialised_summaries.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <string>
#include <utility>

namespace prefixd {
namespace {

// Returns the producer of one variant's blobs. It extends that of the gathered moments; the query
// samples weigh the variant, too.
std::string Producer(const SummaryKind& moments) { return moments.producer() + "; kept/1"; }

EstimatorSpec MaterialisedSpec(const Model& model, const EstimatorVariant& variant) {
  const KvGeometry& g = model.spec.geometry;
  EstimatorSpec spec{EstimatorKind::kMoment, g.key_dim, g.value_dim};
  const bool factored = variant.rank > 0 && variant.rank < std::min(g.key_dim, g.value_dim);
  spec.cross = variant.rank > 0 && !factored;
  spec.covariance = variant.covariance;
  spec.rank = factored ? variant.rank : 0;
  return spec;
}

std::optional<SummarySet> LoadMaterialisedMoments(const DerivedContext& context, const Model& model,
                                                  const storage::SegmentId& id,
                                                  const EstimatorVariant& variant,
                                                  std::vector<storage::ReadStats>* reads) {
  const std::string producer = Producer(SummaryKind::Moments(model, context.options));
  const auto blob = context.segments.GetBlob(id, MaterialisedBlobName(variant), producer);
  if (!blob.ok()) return std::nullopt;
  auto set = UnpackSummaries(
      model, producer, [&](size_t) { return MaterialisedSpec(model, variant); }, *blob, reads);
  if (!set.ok()) return std::nullopt;  // the caller makes it again from the checkpoints
  return std::move(set).value();
}

// Reduces the gathered summaries to the variant, head by head.
Result<SummarySet> Reduce(const SummarySource& source, const SummarySet& gathered,
                          const EstimatorVariant& variant, const SummarySet* alike,
                          const QuerySamples* samples) {
  SummarySet kept = gathered;
  const KvGeometry& geometry = source.model.spec.geometry;
  const auto reduce = [&](size_t head) -> Status {
    if (!source.model.Summarised(static_cast<uint32_t>(head / geometry.n_kv_heads))) return {};
    PREFIXD_ASSIGN(kept[head], gathered[head].Keep(variant, QueryRms(samples, geometry, head),
                                                   alike ? &alike->at(head) : nullptr));
    return {};
  };
  PREFIXD_TRY(source.context.pool.ParallelFor(gathered.size(), reduce, source.priority));
  return kept;
}

// Returns whether the mid region is that of a whole prefix, whose summaries ingest materialises.
bool EndsWithSegment(const SummarySource& source) {
  if (source.parts.empty()) return false;
  const SegmentPart& last = source.parts.back();
  return last.used.end == last.stored.end &&
         source.mid == Partition::Of(last.stored.end, source.context.options.anchors).mid;
}

Result<std::shared_ptr<const MaterialisedSummaries>> LoadMoments(
    const SummarySource& source, const EstimatorVariant& variant,
    std::optional<SummarySet>& gathered) {
  auto out = std::make_shared<MaterialisedSummaries>();
  const SummaryKind kind = SummaryKind::Moments(source.model, source.context.options);
  std::optional<SummarySet> alike;
  for (auto part = source.parts.rbegin(); part != source.parts.rend() && !alike; ++part) {
    const bool own = part == source.parts.rbegin() && EndsWithSegment(source);
    if (!own && variant.rank == 0) break;  // another length lends rank-r factors alone
    alike = LoadMaterialisedMoments(source.context, source.model, part->id, variant, source.reads);
    if (own && alike) {
      out->heads = *std::move(alike);
      return std::shared_ptr<const MaterialisedSummaries>(std::move(out));
    }
  }
  if (!gathered) {
    PREFIXD_ASSIGN(gathered,
                   AssembleSummaries(source.context, kind, source.prefix, source.parts, source.mid,
                                     source.max_added, source.priority, source.reads));
  }
  PREFIXD_ASSIGN(out->heads,
                 Reduce(source, *gathered, variant, alike ? &*alike : nullptr, nullptr));
  return std::shared_ptr<const MaterialisedSummaries>(std::move(out));
}

Result<std::shared_ptr<const MaterialisedSummaries>> LoadPhi(const SummarySource& source,
                                                             const EstimatorVariant& variant) {
  auto out = std::make_shared<MaterialisedSummaries>();
  const SummaryKind kind = SummaryKind::Phi(source.model, *source.maps, source.context.options);
  PREFIXD_ASSIGN(const SummarySet gathered,
                 AssembleSummaries(source.context, kind, source.prefix, source.parts, source.mid,
                                   source.max_added, source.priority, source.reads));
  PREFIXD_ASSIGN(out->heads, Reduce(source, gathered, variant, nullptr, nullptr));
  return std::shared_ptr<const MaterialisedSummaries>(std::move(out));
}

}  // namespace

Status CheckGathered(const RuntimeOptions& options, const EstimatorVariant& variant) {
  const auto has = [&](auto enough) { return std::ranges::any_of(options.estimators, enough); };
  bool gathered = true;
  switch (variant.kind) {
    case EstimatorKind::kMoment:
      gathered = (variant.rank == 0 || has([](const EstimatorVariant& v) {
                    return v.kind == EstimatorKind::kMoment && v.rank > 0;
                  })) &&
                 (!variant.covariance || has([](const EstimatorVariant& v) {
                   return v.kind == EstimatorKind::kMoment && v.covariance;
                 }));
      break;
    case EstimatorKind::kClusterMoment:
      gathered =
          has([](const EstimatorVariant& v) { return v.kind == EstimatorKind::kClusterMoment; });
      break;
    case EstimatorKind::kCentroid:
      gathered = has([](const EstimatorVariant& v) {
        return v.kind == EstimatorKind::kClusterMoment || v.kind == EstimatorKind::kCentroid;
      });
      break;
    case EstimatorKind::kScan:
      gathered = has([](const EstimatorVariant& v) { return v.clustered(); });
      break;
    default:
      break;
  }
  if (gathered) return {};
  return Error{Code::kFailedPrecondition,
               "estimator '" + variant.Name() + "' is not built by this store; it builds " +
                   VariantNames(options.estimators) +
                   " (ingest.estimators): use one of these, or add it there and wait until the "
                   "prefixes are ready again"};
}

std::vector<EstimatorVariant> MaterialisedMoments(const RuntimeOptions& options) {
  std::vector<EstimatorVariant> kept = {EstimatorKind::kMoment};
  for (const EstimatorVariant& v : options.estimators) {
    if (v.kind == EstimatorKind::kMoment && std::ranges::count(kept, v.Kept()) == 0) {
      kept.push_back(v.Kept());
    }
  }
  return kept;
}

std::string MaterialisedBlobName(const EstimatorVariant& variant) {
  std::string name = "kept." + variant.Kept().Name();
  std::ranges::replace(name, '/', '-');
  return name;
}

std::vector<float> QueryRms(const QuerySamples* samples, const KvGeometry& geometry, size_t head) {
  if (samples == nullptr) return {};
  const QuerySamples::Layer& layer = samples->layers[head / geometry.n_kv_heads];
  const size_t n = layer.positions.size(), group = geometry.group_size();
  const size_t first = head % geometry.n_kv_heads * group;
  if (n == 0) return {};
  std::vector<double> sum(geometry.key_dim);
  for (size_t s = 0; s < n; ++s) {
    for (size_t g = 0; g < group; ++g) {
      const float* q = layer.q.data() + (s * geometry.n_q_heads + first + g) * geometry.key_dim;
      for (uint32_t j = 0; j < geometry.key_dim; ++j) sum[j] += double{q[j]} * q[j];
    }
  }
  std::vector<float> rms(geometry.key_dim);
  for (uint32_t j = 0; j < geometry.key_dim; ++j) {
    rms[j] = static_cast<float>(std::sqrt(sum[j] / double(n * group)));
  }
  return rms;
}

Result<MaterialisedByVariant> LoadMaterialised(const SummarySource& source,
                                               std::span<const EstimatorVariant> variants) {
  MaterialisedByVariant all;
  std::optional<SummarySet> moments;
  std::shared_ptr<const PrefixClusters> clusters;
  for (const EstimatorVariant& variant : variants) {
    if (variant.kind == EstimatorKind::kNone || variant.kind == EstimatorKind::kAuto ||
        all.contains(variant)) {
      continue;
    }
    PREFIXD_TRY(CheckGathered(source.context.options, variant));
    if (variant.kind == EstimatorKind::kMoment) {
      PREFIXD_ASSIGN(all[variant], LoadMoments(source, variant, moments));
    } else if (variant.kind == EstimatorKind::kPhi) {
      PREFIXD_ASSIGN(all[variant], LoadPhi(source, variant));
    } else {
      if (!clusters) {
        PREFIXD_ASSIGN(clusters, PrefixClusters::Assemble(
                                     source.context, source.model, source.prefix, source.parts,
                                     source.mid, source.max_added, source.priority, source.reads));
      }
      auto kept = std::make_shared<MaterialisedSummaries>();
      kept->clusters = clusters;
      PREFIXD_ASSIGN(kept->heads, Reduce(source, clusters->summaries(), variant, nullptr, nullptr));
      all[variant] = std::move(kept);
    }
  }
  return all;
}

Status BuildMaterialised(const DerivedContext& context, const Model& model,
                         const storage::StoredPrefix& prefix, const SegmentPart& segment,
                         const QuerySamples* samples, WorkProgress& progress) {
  const size_t heads = HeadCount(model);
  const TokenRange mid = Partition::Of(segment.stored.end, context.options.anchors).mid;
  const SummaryKind kind = SummaryKind::Moments(model, context.options);
  const std::string producer = Producer(kind);
  PREFIXD_ASSIGN(const auto parts, ChainParts(context.segments, prefix.info(), segment.stored.end));
  const SummarySource source{context,
                             model,
                             prefix,
                             parts,
                             mid,
                             nullptr,
                             std::numeric_limits<uint64_t>::max(),
                             WorkPriority::kBackground,
                             nullptr};
  std::optional<SummarySet> gathered;
  for (const EstimatorVariant& variant : MaterialisedMoments(context.options)) {
    PREFIXD_TRY(progress.Check());
    if (!LoadMaterialisedMoments(context, model, segment.id, variant, nullptr)) {
      if (!gathered) {
        PREFIXD_ASSIGN(gathered, AssembleSummaries(context, kind, prefix, parts, mid,
                                                   source.max_added, source.priority, nullptr));
      }
      PREFIXD_ASSIGN(const SummarySet kept, Reduce(source, *gathered, variant, nullptr, samples));
      PREFIXD_TRY(context.segments.PutBlob(segment.id, MaterialisedBlobName(variant), producer,
                                           PackSummaries(model, producer, kept)));
    }
    progress.done += heads;
  }
  return {};
}

}  // namespace prefixd
