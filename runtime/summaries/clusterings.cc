#include "runtime/summaries/clusterings.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "runtime/derived/unread.h"
#include "runtime/summaries/clustering_codec.h"

namespace prefixd {
namespace {

constexpr const char* kBlob = "clustering";
// Each cluster is fit to this many keys, taken in runs spread over the segment.
constexpr uint32_t kSampleKeys = 64;
constexpr uint32_t kSampleRuns = 16;
constexpr int kIterations = 5;

std::string Producer(const RuntimeOptions& options) {
  return "clustering/1 sinks=" + std::to_string(options.anchors.n_sink) +
         " n=" + std::to_string(options.clusters);
}

// Fits a clustering to keys of the segment's own tokens, without sinks, spread evenly over it.
Result<Clustering> Fit(const DerivedContext& context, const Model& model,
                       const storage::StoredPrefix& prefix, size_t head, TokenRange tokens) {
  const uint32_t layer = model.heads.layer_of(head);
  const RowShape row = model.spec.geometry.row(layer);
  const RowShape key{row.key_dim, 0, row.dtype};
  const uint32_t wanted = std::min(tokens.size(), kSampleKeys * context.options.clusters);
  const uint32_t runs = wanted == tokens.size() ? 1 : std::min(kSampleRuns, wanted);
  const uint32_t run = wanted / runs;
  std::vector<std::byte> keys(size_t{runs} * run * key.bytes());
  for (uint32_t r = 0; r < runs; ++r) {
    const uint64_t room = tokens.size() - run;
    const uint32_t begin =
        tokens.begin + static_cast<uint32_t>(runs == 1 ? 0 : r * room / (runs - 1));
    const auto out = std::span(keys).subspan(size_t{r} * run * key.bytes(), run * key.bytes());
    PREFIXD_TRY(prefix.ReadRange(layer, model.heads.head_of(head), {begin, begin + run},
                                 storage::RowPart::kKey, {out, key.bytes()}, nullptr));
  }
  return Clustering::Fit({keys.data(), size_t{runs} * run, key.bytes(), key},
                         context.options.clusters, kIterations);
}

Result<std::vector<Clustering>> Decode(const Model& model, std::span<const std::byte> blob) {
  std::vector<uint32_t> key_dims(HeadCount(model));
  for (size_t head = 0; head < key_dims.size(); ++head) {
    const uint32_t layer = model.heads.layer_of(head);
    key_dims[head] = model.Summarised(layer) ? model.spec.geometry.row(layer).key_dim : 0;
  }
  return DeserializeClusterings(blob, key_dims);
}

}  // namespace

Result<std::vector<Clustering>> BuildClusterings(const DerivedContext& context, const Model& model,
                                                 const storage::StoredPrefix& prefix,
                                                 const SegmentPart& segment,
                                                 WorkProgress& progress) {
  const std::string producer = Producer(context.options);
  const auto blob = context.segments.GetBlob(segment.id, kBlob, producer);
  if (!blob.ok() && Unread(blob.error())) return blob.error();
  if (blob.ok()) {
    if (auto stored = Decode(model, *blob); stored.ok()) {
      progress.done += HeadCount(model);
      return stored;
    }
  }
  const TokenRange tokens{std::max(segment.stored.begin, context.options.anchors.n_sink),
                          segment.stored.end};
  std::vector<Clustering> clusterings(HeadCount(model));
  const auto fit = [&](size_t head) -> Status {
    PREFIXD_TRY(progress.Check());
    if (model.Summarised(model.heads.layer_of(head))) {
      PREFIXD_ASSIGN(clusterings[head], Fit(context, model, prefix, head, tokens));
    }
    ++progress.done;
    return {};
  };
  PREFIXD_TRY(context.pool.ParallelFor(clusterings.size(), fit, WorkPriority::kBackground));
  PREFIXD_TRY(
      context.segments.PutBlob(segment.id, kBlob, producer, SerializeClusterings(clusterings)));
  return clusterings;
}

bool HasClusterings(const DerivedContext& context, const storage::SegmentId& id) {
  return std::ranges::count(context.segments.ListBlobs(id), kBlob) > 0;
}

Result<std::vector<Clustering>> LoadClusterings(const DerivedContext& context, const Model& model,
                                                const storage::SegmentId& id) {
  const auto blob = context.segments.GetBlob(id, kBlob, Producer(context.options));
  if (!blob.ok() && blob.error().code == Code::kNotFound) {
    return Error{Code::kFailedPrecondition,
                 "the clusters of this prefix are not built yet; wait until it is ready "
                 "(WaitReady) or use estimator moment"};
  }
  if (!blob.ok()) return blob.error();
  return Decode(model, *blob);
}

Result<std::shared_ptr<const PrefixClusters>> PrefixClusters::Assemble(
    const DerivedContext& context, const Model& model, const storage::StoredPrefix& prefix,
    const std::vector<SegmentPart>& parts, TokenRange mid, uint64_t max_added,
    WorkPriority priority, std::vector<storage::ReadStats>* reads, const MemoryAccount& memory) {
  auto out = std::make_shared<PrefixClusters>();
  out->account_ = memory;
  out->memory_ = memory.Charge(MemoryKind::kSummaries);
  out->mid_ = mid;
  out->dtype_ = model.spec.geometry.dtype;
  out->of_mid_ = std::vector<Kept>(HeadCount(model));
  std::vector<SegmentPart> used;
  size_t largest = 0;
  for (const SegmentPart& part : parts) {
    const TokenRange range{std::max(part.used.begin, mid.begin), std::min(part.used.end, mid.end)};
    if (range.begin >= range.end) continue;
    PREFIXD_ASSIGN(auto clusterings, LoadClusterings(context, model, part.id));
    out->parts_.push_back(
        {range, std::make_shared<const std::vector<Clustering>>(std::move(clusterings)), {}});
    used.push_back(part);
    if (range.size() > out->parts_[largest].range.size()) largest = out->parts_.size() - 1;
  }
  if (out->parts_.empty()) {
    return Error{Code::kFailedPrecondition, "a prefix without a mid region has no clusters"};
  }
  out->main_ = out->parts_[largest].clusterings;
  for (size_t p = 0; p < used.size(); ++p) {
    Part& part = out->parts_[p];
    const SummaryKind kind = SummaryKind::Clusters(model, *part.clusterings, context.options);
    uint64_t bytes = p == 0 ? kind.MemoryBytes() : 0;  // the others are added to the first
    for (const Clustering& c : *part.clusterings) bytes += c.memory_bytes();
    PREFIXD_TRY(out->memory_.Resize(out->memory_.bytes() + bytes));
    PREFIXD_ASSIGN(const MemoryCharge gathering,
                   memory.Take(MemoryKind::kSummaries, 2 * kind.MemoryBytes()));
    PREFIXD_ASSIGN(SummarySet sums, AssembleSummaries(context, kind, prefix, {used[p]}, part.range,
                                                      max_added, priority, reads));
    if (part.clusterings != out->main_) part.to.resize(sums.size());
    for (size_t head = 0; head < sums.size() && !part.to.empty(); ++head) {
      const Clustering& own = part.clusterings->at(head);
      if (own.size() == 0) continue;
      const RowShape centre{own.dim(), 0, DType::kF32};
      part.to[head] =
          out->clustering(head).Assign({reinterpret_cast<const std::byte*>(own.centre(0).data()),
                                        own.size(), centre.bytes(), centre});
      PREFIXD_TRY(sums[head].Coarsen(part.to[head], &out->clustering(head)));
    }
    if (p == 0) {
      out->summaries_ = std::move(sums);
      continue;
    }
    for (size_t head = 0; head < sums.size(); ++head) {
      PREFIXD_TRY(out->summaries_[head].Merge(sums[head]));
    }
  }
  return std::shared_ptr<const PrefixClusters>(std::move(out));
}

std::vector<uint16_t> PrefixClusters::Of(size_t head, TokenRange run, const RowsView& keys) const {
  std::vector<uint16_t> clusters(keys.count);
  for (const Part& part : parts_) {
    const uint32_t begin = std::max(run.begin, part.range.begin);
    const uint32_t end = std::min(run.end, part.range.end);
    if (begin >= end) continue;
    uint16_t* out = clusters.data() + (begin - run.begin);
    const auto own = part.clusterings->at(head).Assign(keys.Sub(begin - run.begin, end - begin));
    for (size_t i = 0; i < own.size(); ++i) {
      out[i] = part.to.empty() ? own[i] : part.to[head][own[i]];
    }
  }
  return clusters;
}

Result<std::span<const uint16_t>> PrefixClusters::OfMid(size_t head, index::KeyReader& keys) const {
  constexpr uint32_t kRun = 4096;
  Kept& kept = of_mid_[head];
  const RowShape key{clustering(head).dim(), 0, dtype_};
  std::lock_guard lock(kept.mutex);
  if (!kept.found) {
    PREFIXD_ASSIGN(kept.memory,
                   account_.Take(MemoryKind::kSummaries, uint64_t{mid_.size()} * sizeof(uint16_t)));
    std::vector<uint16_t> clusters;
    clusters.reserve(mid_.size());
    std::vector<std::byte> bytes;
    for (uint32_t at = mid_.begin, end = 0; at < mid_.end; at = end) {
      end = std::min(mid_.end, keys.RunEnd(at, kRun));
      bytes.resize((end - at) * key.bytes());
      PREFIXD_TRY(keys.Range({at, end}, bytes));
      const auto of_run = Of(head, {at, end}, {bytes.data(), end - at, key.bytes(), key});
      clusters.insert(clusters.end(), of_run.begin(), of_run.end());
    }
    kept.clusters = std::move(clusters);
    kept.found = true;
  }
  return std::span<const uint16_t>(kept.clusters);
}

}  // namespace prefixd
