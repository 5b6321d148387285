#include "runtime/summaries/materialised_summaries.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <optional>
#include <string>
#include <utility>

#include "runtime/derived/unread.h"

namespace prefixd {
namespace {

// Returns the producer of one variant's blobs. It extends that of the gathered moments; the query
// samples weigh the variant, too.
std::string Producer(const SummaryKind& moments) { return moments.producer() + "; kept/1"; }

EstimatorSpec MaterialisedSpec(const Model& model, const EstimatorVariant& variant, size_t head) {
  EstimatorSpec spec = EmptySpec(model, head);
  spec.kind = EstimatorKind::kMoment;
  const bool factored = variant.rank > 0 && variant.rank < std::min(spec.key_dim, spec.value_dim);
  spec.cross = variant.rank > 0 && !factored;
  spec.covariance = variant.covariance;
  spec.rank = factored ? variant.rank : 0;
  return spec;
}

// Returns nothing where there is none, or a damaged one: the caller makes it again from the
// checkpoints. `only`: the heads to load; empty: all.
Result<std::optional<SummarySet>> LoadMaterialisedMoments(
    const DerivedContext& context, const Model& model, const storage::SegmentId& id,
    const EstimatorVariant& variant, const HeadSet& only, std::vector<storage::ReadStats>* reads) {
  const std::string producer = Producer(SummaryKind::Moments(model, context.options));
  const auto blob = context.segments.GetBlob(id, MaterialisedBlobName(variant), producer);
  if (!blob.ok() && Unread(blob.error())) return blob.error();
  if (!blob.ok()) return std::optional<SummarySet>();
  const auto spec = [&](size_t head) {
    return only.empty() || only[head] ? std::optional(MaterialisedSpec(model, variant, head))
                                      : std::nullopt;
  };
  auto set = UnpackSummaries(model, producer, spec, *blob, reads);
  if (!set.ok()) return std::optional<SummarySet>();
  return std::optional(std::move(set).value());
}

// Reduces the gathered summaries of `heads` to the variant; the others stay empty.
Result<SummarySet> Reduce(const SummarySource& source, const SummarySet& gathered,
                          std::span<const size_t> heads, const EstimatorVariant& variant,
                          const SummarySet* alike, const QuerySamples* samples) {
  SummarySet kept;
  kept.reserve(gathered.size());
  for (size_t head = 0; head < gathered.size(); ++head) {
    PREFIXD_ASSIGN(auto nothing, EstimatorSummary::Create(EmptySpec(source.model, head)));
    kept.push_back(std::move(nothing));
  }
  const auto reduce = [&](size_t i) -> Status {
    const size_t head = heads[i];
    if (!source.model.Summarised(source.model.heads.layer_of(head))) return {};
    PREFIXD_ASSIGN(kept[head], gathered[head].Keep(variant, QueryRms(samples, source.model, head),
                                                   alike ? &alike->at(head) : nullptr));
    return {};
  };
  PREFIXD_TRY(source.context.pool.ParallelFor(heads.size(), reduce, source.priority));
  return kept;
}

std::vector<size_t> AllHeads(const Model& model) {
  std::vector<size_t> heads(HeadCount(model));
  std::iota(heads.begin(), heads.end(), size_t{0});
  return heads;
}

HeadSet SetOf(const Model& model, std::span<const size_t> heads) {
  HeadSet set(HeadCount(model));
  for (const size_t head : heads) set[head] = true;
  return set;
}

// Returns whether the mid region is that of a whole prefix, whose summaries ingest materialises.
bool EndsWithSegment(const SummarySource& source) {
  if (source.parts.empty()) return false;
  const SegmentPart& last = source.parts.back();
  return last.used.end == last.stored.end &&
         source.mid == Partition::Of(last.stored.end, source.context.options.anchors).mid;
}

// What several moment variants are reduced from: gathered once, for all heads that need it.
struct GatheredMoments {
  SummaryKind kind;
  std::optional<SummarySet> set;
  MemoryCharge memory;
};

Status Gather(const SummarySource& source, GatheredMoments& moments) {
  if (moments.set) return {};
  // The checkpoint of a segment lies beside the sum.
  PREFIXD_ASSIGN(moments.memory,
                 source.memory.Take(MemoryKind::kSummaries, 2 * moments.kind.MemoryBytes()));
  PREFIXD_ASSIGN(moments.set,
                 AssembleSummaries(source.context, moments.kind, source.prefix, source.parts,
                                   source.mid, source.max_added, source.priority, source.reads));
  return {};
}

Result<SummarySet> LoadMoments(const SummarySource& source, const EstimatorVariant& variant,
                               std::span<const size_t> heads, GatheredMoments& gathered) {
  const HeadSet only = SetOf(source.model, heads);
  std::optional<SummarySet> alike;
  for (auto part = source.parts.rbegin(); part != source.parts.rend() && !alike; ++part) {
    const bool own = part == source.parts.rbegin() && EndsWithSegment(source);
    if (!own && variant.rank == 0) break;  // another length lends rank-r factors alone
    PREFIXD_ASSIGN(alike, LoadMaterialisedMoments(source.context, source.model, part->id, variant,
                                                  only, source.reads));
    if (own && alike) return *std::move(alike);
  }
  PREFIXD_TRY(Gather(source, gathered));
  return Reduce(source, *gathered.set, heads, variant, alike ? &*alike : nullptr, nullptr);
}

Result<SummarySet> LoadPhi(const SummarySource& source, const EstimatorVariant& variant,
                           std::span<const size_t> heads) {
  const SummaryKind kind = SummaryKind::Phi(source.model, *source.maps, source.context.options)
                               .Only(SetOf(source.model, heads));
  PREFIXD_ASSIGN(const MemoryCharge gathering,
                 source.memory.Take(MemoryKind::kSummaries, 2 * kind.MemoryBytes()));
  PREFIXD_ASSIGN(const SummarySet gathered,
                 AssembleSummaries(source.context, kind, source.prefix, source.parts, source.mid,
                                   source.max_added, source.priority, source.reads));
  return Reduce(source, gathered, heads, variant, nullptr, nullptr);
}

Result<std::shared_ptr<const PrefixClusters>> Clusters(const SummarySource& source) {
  if (source.clusters) {
    if (auto shared = source.clusters->lock()) return shared;
  }
  PREFIXD_ASSIGN(auto made, PrefixClusters::Assemble(source.context, source.model, source.prefix,
                                                     source.parts, source.mid, source.max_added,
                                                     source.priority, source.reads, source.memory));
  if (source.clusters) *source.clusters = made;
  return made;
}

// Counts what is kept of `heads`, and moves it to `out`.
Status KeepHeads(const SummarySource& source, std::span<const size_t> heads, SummarySet& made,
                 const std::shared_ptr<const PrefixClusters>& clusters,
                 std::map<size_t, std::shared_ptr<const KeptSummary>>& out) {
  for (const size_t head : heads) {
    if (made[head].kind() == EstimatorKind::kNone) continue;
    PREFIXD_ASSIGN(auto memory,
                   source.memory.Take(MemoryKind::kSummaries, made[head].memory_bytes()));
    out.emplace(head, std::make_shared<const KeptSummary>(std::move(made[head]), clusters,
                                                          std::move(memory)));
  }
  return {};
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
    case EstimatorKind::kCentroid:
      gathered = has([](const EstimatorVariant& v) { return v.kind == EstimatorKind::kCentroid; });
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
    if (v.kind == EstimatorKind::kMoment && std::ranges::count(kept, v) == 0) kept.push_back(v);
  }
  return kept;
}

std::string MaterialisedBlobName(const EstimatorVariant& variant) {
  std::string name = "kept." + variant.Name();
  std::ranges::replace(name, '/', '-');
  return name;
}

std::vector<float> QueryRms(const QuerySamples* samples, const Model& model, size_t head) {
  if (samples == nullptr) return {};
  const uint32_t of_layer = model.heads.layer_of(head);
  const QuerySamples::Layer& layer = samples->layers[of_layer];
  const LayerShape shape = model.spec.geometry.layer(of_layer);
  const size_t n = layer.positions.size(), group = shape.group_size();
  const size_t first = model.heads.head_of(head) * group;
  if (n == 0) return {};
  std::vector<double> sum(shape.key_dim);
  for (size_t s = 0; s < n; ++s) {
    for (size_t g = 0; g < group; ++g) {
      const float* q = layer.q.data() + (s * shape.n_q_heads + first + g) * shape.key_dim;
      for (uint32_t j = 0; j < shape.key_dim; ++j) sum[j] += double{q[j]} * q[j];
    }
  }
  std::vector<float> rms(shape.key_dim);
  for (uint32_t j = 0; j < shape.key_dim; ++j) {
    rms[j] = static_cast<float>(std::sqrt(sum[j] / double(n * group)));
  }
  return rms;
}

Result<KeptSummaries> LoadMaterialised(const SummarySource& source, const HeadsOfVariants& wanted) {
  KeptSummaries all;
  HeadSet of_moments(HeadCount(source.model));
  for (const auto& [variant, heads] : wanted) {
    PREFIXD_TRY(CheckGathered(source.context.options, variant));
    if (variant.kind != EstimatorKind::kMoment) continue;
    for (const size_t head : heads) of_moments[head] = true;
  }
  GatheredMoments moments{
      SummaryKind::Moments(source.model, source.context.options).Only(std::move(of_moments)),
      std::nullopt,
      {}};
  for (const auto& [variant, heads] : wanted) {
    if (variant.kind == EstimatorKind::kNone || variant.kind == EstimatorKind::kAuto) continue;
    SummarySet made;
    std::shared_ptr<const PrefixClusters> clusters;
    if (variant.kind == EstimatorKind::kMoment) {
      PREFIXD_ASSIGN(made, LoadMoments(source, variant, heads, moments));
    } else if (variant.kind == EstimatorKind::kPhi) {
      PREFIXD_ASSIGN(made, LoadPhi(source, variant, heads));
    } else {
      PREFIXD_ASSIGN(clusters, Clusters(source));
      PREFIXD_ASSIGN(made, Reduce(source, clusters->summaries(), heads, variant, nullptr, nullptr));
    }
    PREFIXD_TRY(KeepHeads(source, heads, made, clusters, all[variant]));
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
  const std::vector<size_t> all_heads = AllHeads(model);
  for (const EstimatorVariant& variant : MaterialisedMoments(context.options)) {
    PREFIXD_TRY(progress.Check());
    PREFIXD_ASSIGN(const auto stored,
                   LoadMaterialisedMoments(context, model, segment.id, variant, {}, nullptr));
    if (!stored) {
      if (!gathered) {
        PREFIXD_ASSIGN(gathered, AssembleSummaries(context, kind, prefix, parts, mid,
                                                   source.max_added, source.priority, nullptr));
      }
      PREFIXD_ASSIGN(const SummarySet kept,
                     Reduce(source, *gathered, all_heads, variant, nullptr, samples));
      PREFIXD_TRY(context.segments.PutBlob(segment.id, MaterialisedBlobName(variant), producer,
                                           PackSummaries(model, producer, kept)));
    }
    progress.done += heads;
  }
  return {};
}

}  // namespace prefixd
