#include "gpu/host_batch.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "attention/remainder.h"
#include "gpu/phi_pack.h"
#include "gpu/step_layout.h"

namespace prefixd::gpu::internal {
namespace {

bool UsesClusters(EstimatorKind kind) {
  return kind == EstimatorKind::kCentroid || kind == EstimatorKind::kClusterMoment ||
         kind == EstimatorKind::kScan;
}

// The estimator that has something to do: none when everything was retrieved.
EstimatorKind Effective(const GroupStepInput& in) {
  return in.retrieved.count == in.mid_count ? EstimatorKind::kNone : in.estimator;
}

Status CheckRows(const char* name, const RowsView& rows, const RowShape& shape) {
  if (rows.count == 0 || rows.shape == shape) return {};
  return InvalidArgument(std::string(name) +
                         " rows differ in dimensions or dtype from the batch's");
}

Status CheckSummaries(const GroupStepInput& in, const StepShape& shape) {
  if (in.estimator == EstimatorKind::kNone) return {};
  if (in.estimator == EstimatorKind::kAuto) {
    return InvalidArgument("estimator 'auto' must be resolved before a step");
  }
  if (in.layer.softcap > 0) {
    return InvalidArgument("a layer with a softcap attends exactly or by selection only");
  }
  if (in.retrieved.count > in.mid_count || in.mid_count > UINT32_MAX) {
    return InvalidArgument(std::to_string(in.retrieved.count) + " retrieved rows; the mid region " +
                           "has " + std::to_string(in.mid_count));
  }
  const auto nan = [](const Cut& cut) { return std::isnan(cut.score); };
  if (std::ranges::any_of(in.cuts, nan)) return InvalidArgument("a cut is NaN");
  if (Effective(in) == EstimatorKind::kNone) return {};
  PREFIXD_TRY(CheckEstimatorInputs(in, shape.row.key_dim, shape.row.value_dim));
  if (in.estimator == EstimatorKind::kPhi && in.phi->d_phi() != shape.d_phi) {
    return InvalidArgument("the phi caches of a batch differ in their number of features");
  }
  return {};
}

Status CheckGroup(const GroupStepInput& in, const GroupStepOutput& out, const StepShape& shape) {
  const size_t g = shape.group;
  if (in.group != shape.group || in.queries.size() != g * shape.row.key_dim ||
      out.y.size() != g * shape.row.value_dim || out.lse.size() != g || out.rho_z.size() != g) {
    return InvalidArgument(
        "queries must be [group][key_dim], outputs y [group][value_dim], lse and rho_z [group]");
  }
  if (!(in.layer == shape.layer)) return InvalidArgument("all groups must be of one layer");
  if (!in.cuts.empty() && in.cuts.size() != g) {
    return InvalidArgument("cuts must be empty or one per query head");
  }
  PREFIXD_TRY(CheckRows("sinks", in.sinks, shape.row));
  PREFIXD_TRY(CheckRows("tail", in.tail, shape.row));
  PREFIXD_TRY(CheckRows("retrieved", in.retrieved, shape.row));
  return CheckSummaries(in, shape);
}

// The shape that covers a batch; members that groups must agree in are the first group's.
Result<StepShape> ShapeOf(std::span<const GroupStepInput> in,
                          std::span<const GroupStepOutput> out) {
  if (in.empty() || in.size() != out.size()) {
    return InvalidArgument("a batch needs at least one group, and one output for each");
  }
  const uint32_t g = in[0].group;
  if (g == 0 || in[0].queries.size() % g != 0 || out[0].y.size() % g != 0) {
    return InvalidArgument("queries must be [group][key_dim] with at least one head");
  }
  StepShape shape;
  shape.n_groups = static_cast<uint32_t>(in.size());
  shape.group = g;
  shape.layer = in[0].layer;
  shape.row = {static_cast<uint32_t>(in[0].queries.size() / g),
               static_cast<uint32_t>(out[0].y.size() / g), DType::kF32};
  bool has_dtype = false;
  for (const GroupStepInput& group : in) {
    for (const RowsView* rows : {&group.sinks, &group.tail, &group.retrieved}) {
      if (rows->count > 0 && !has_dtype) {
        shape.row.dtype = rows->shape.dtype;
        has_dtype = true;
      }
    }
    const size_t n = group.sinks.count + group.tail.count + group.retrieved.count;
    if (n > kMaxRows) return InvalidArgument(std::to_string(n) + " exact rows in one group");
    shape.max_rows = std::max(shape.max_rows, static_cast<uint32_t>(n));
    const EstimatorKind estimator = Effective(group);
    if (UsesClusters(estimator) && group.clusters) {
      shape.max_clusters = std::max(shape.max_clusters, group.clusters->size());
    }
    if (estimator != EstimatorKind::kPhi) continue;
    if (group.phi) shape.d_phi = group.phi->d_phi();
    if (group.phi_k) shape.d_emb = std::max(shape.d_emb, group.phi_k->d_emb);
    for (const FeatureMap& map : group.phi_q) shape.d_emb = std::max(shape.d_emb, map.d_emb);
  }
  return shape;
}

// What is packed once although several groups or heads share it.
struct Packed {
  std::map<const FeatureMap*, DeviceQueryMap> query_maps;
  std::map<const FeatureMap*, DeviceKeyMap> key_maps;
};

DeviceQueryMap PackQueryMap(const FeatureMap& map, HostImage& image, Packed& done) {
  if (const auto found = done.query_maps.find(&map); found != done.query_maps.end()) {
    return found->second;
  }
  DeviceQueryMap d;
  d.in_dim = map.in_dim;
  d.d_emb = map.d_emb;
  d.d_phi = map.d_phi;
  d.alpha = map.alpha;
  d.w_in = image.AddTransposed(map.w_in, map.d_emb, map.in_dim);
  d.b_in = image.Add<float>(map.b_in);
  d.w1 = image.AddTransposed(map.w1, map.d_emb, map.d_emb);
  d.b1 = image.Add<float>(map.b1);
  d.w2 = image.AddTransposed(map.w2, map.d_emb, map.d_emb);
  d.b2 = image.Add<float>(map.b2);
  d.w_out = image.AddTransposed(map.w_out, map.d_phi, map.d_emb);
  d.b_out = image.Add<float>(map.b_out);
  return done.query_maps[&map] = d;
}

const uint32_t* PackMatrix(std::span<const float> w, uint32_t n_in, uint32_t n_out,
                           HostImage& image) {
  return image.AddMade<uint32_t>(
      PackedWords(n_in, n_out), [&](std::span<uint32_t> out) { PackWeights(w, n_in, n_out, out); });
}

DeviceKeyMap PackKeyMap(const FeatureMap& map, HostImage& image, Packed& done) {
  if (const auto found = done.key_maps.find(&map); found != done.key_maps.end()) {
    return found->second;
  }
  DeviceKeyMap d;
  d.in_dim = map.in_dim;
  d.d_emb = map.d_emb;
  d.d_phi = map.d_phi;
  d.alpha = map.alpha;
  d.w_in = PackMatrix(map.w_in, map.in_dim, map.d_emb, image);
  d.w1 = PackMatrix(map.w1, map.d_emb, map.d_emb, image);
  d.w2 = PackMatrix(map.w2, map.d_emb, map.d_emb, image);
  d.w_out = PackMatrix(map.w_out, map.d_emb, map.d_phi, image);
  d.b_in = image.Add<float>(map.b_in);
  d.b1 = image.Add<float>(map.b1);
  d.b2 = image.Add<float>(map.b2);
  d.b_out = image.Add<float>(map.b_out);
  return done.key_maps[&map] = d;
}

void PackMoment(const MomentSummary& moment, HostImage& image, DeviceSummary& d) {
  d.key_m2 = image.AddFloats(moment.key_m2());
  d.mean_value = image.AddFloats(moment.mean_value());
  if (moment.has_covariance()) d.covariance = image.AddFloats(moment.covariance());
  if (moment.has_cross()) d.cross = image.AddFloats(moment.cross());
  d.cross_rank = moment.cross_rank();
  if (d.cross_rank > 0) {
    d.key_factor = image.AddFloats(moment.key_factor());
    d.value_factor = image.AddFloats(moment.value_factor());
  }
}

void PackPhi(const GroupStepInput& in, HostImage& image, Packed& done, DeviceSummary& d) {
  d.phi_form = in.phi_form;
  d.phi_m = image.Add(in.phi->m());
  d.phi_u = image.Add(in.phi->u());
  d.phi_t = image.Add(in.phi->t());
  d.phi_q_shared = in.phi_q.empty();
  std::vector<DeviceQueryMap> phi_q;
  for (const FeatureMap& map : in.phi_q) phi_q.push_back(PackQueryMap(map, image, done));
  if (d.phi_q_shared) phi_q.push_back(PackQueryMap(*in.phi_k, image, done));
  d.phi_q = image.Add<DeviceQueryMap>(phi_q);
  if (in.features.data != nullptr) {
    d.feature_format = in.features.format;
    d.feature_m = image.Add(in.features.m);
    d.feature_chunks = static_cast<uint32_t>(in.features.m.size() / in.phi->d_phi());
    return;
  }
  const DeviceKeyMap phi_k = PackKeyMap(*in.phi_k, image, done);
  d.phi_k = image.Add(std::span(&phi_k, 1));
}

void PackClusters(const GroupStepInput& in, HostImage& image, DeviceSummary& d) {
  const ClusterSummary& clusters = *in.clusters;
  d.n_clusters = clusters.size();
  d.spread_dim = clusters.spread_dim();
  const std::vector<uint32_t> counts(clusters.counts().begin(), clusters.counts().end());
  d.cluster_counts = image.Add<uint32_t>(counts);
  d.cluster_values = image.AddFloats(clusters.mean_values());
  if (in.estimator == EstimatorKind::kScan) {
    d.scan_log_mass = image.Add(in.scan.log_mass);
    d.scan_retrieved_scores = image.Add(in.scan.retrieved_scores);
    return;
  }
  d.cluster_keys = image.AddFloats(clusters.mean_keys());
  d.cluster_spreads = image.AddFloats(clusters.spreads());
}

DeviceSummary PackSummary(const GroupStepInput& in, HostImage& image, Packed& done) {
  DeviceSummary d;
  d.estimator = Effective(in);
  d.mid_count = static_cast<uint32_t>(in.mid_count);
  if (d.estimator == EstimatorKind::kNone) return d;
  d.moment_form = in.moment_form;
  if (in.moment) d.mean_key = image.AddFloats(in.moment->mean_key());
  if (d.estimator == EstimatorKind::kMoment) PackMoment(*in.moment, image, d);
  if (d.estimator == EstimatorKind::kPhi) PackPhi(in, image, done, d);
  if (UsesClusters(d.estimator)) PackClusters(in, image, d);
  return d;
}

// What belongs to rows: their clusters and stored features, by row, anchors included.
void PackRowExtras(std::span<const GroupStepInput> in, HostImage& image, BatchStepArgs& args) {
  std::vector<uint16_t> clusters;
  std::vector<const void*> features;
  std::vector<uint32_t> chunks;
  for (const GroupStepInput& group : in) {
    const size_t first = clusters.size() + group.sinks.count + group.tail.count;
    clusters.resize(first + group.retrieved.count);
    features.resize(clusters.size());
    chunks.resize(clusters.size());
    const EstimatorKind estimator = Effective(group);
    if (UsesClusters(estimator)) {
      if (group.retrieved_clusters.empty()) {
        std::ranges::copy(group.clustering->Assign(group.retrieved), clusters.begin() + first);
      } else {
        std::ranges::copy(group.retrieved_clusters, clusters.begin() + first);
      }
    }
    if (estimator != EstimatorKind::kPhi || group.features.data == nullptr) continue;
    const size_t bytes = group.features.format.RowBytes(group.phi->d_phi());
    for (size_t i = 0; i < group.retrieved.count; ++i) {
      features[first + i] = image.Here();
      image.AddBytes(group.features.data + i * group.features.stride, bytes);
    }
    std::ranges::copy(group.features.chunks, chunks.begin() + first);
  }
  args.row_clusters = image.Add<uint16_t>(clusters);
  args.features = image.Add<const void*>(features);
  args.feature_chunk = image.Add<uint32_t>(chunks);
}

// Names a bad row by the tensor it came in.
Status Explain(uint32_t word, const GroupStepInput& in) {
  if (word != kGroupOk && word >> kFaultShift == static_cast<uint32_t>(GroupFault::kRow)) {
    const uint32_t detail = word & ((1u << kFaultShift) - 1);
    const char* what = detail % 2 ? "value" : "key";
    size_t row = detail / 2;
    for (const auto& [name, rows] :
         {std::pair{"sinks", &in.sinks}, {"tail", &in.tail}, {"retrieved", &in.retrieved}}) {
      if (row < rows->count) {
        return InvalidArgument(std::string(name) + " row " + std::to_string(row) + ": its " + what +
                               " holds NaN or infinity");
      }
      row -= rows->count;
    }
  }
  return GroupError(word, static_cast<uint32_t>(in.sinks.count + in.tail.count));
}

Error InGroup(Error error, size_t index, size_t n) {
  if (n > 1) error.message = "group " + std::to_string(index) + ": " + error.message;
  return error;
}

}  // namespace

Result<StepShape> CheckBatch(std::span<const GroupStepInput> in,
                             std::span<const GroupStepOutput> out) {
  PREFIXD_ASSIGN(const StepShape shape, ShapeOf(in, out));
  for (size_t i = 0; i < in.size(); ++i) {
    if (const Status s = CheckGroup(in[i], out[i], shape); !s.ok()) {
      return InGroup(s.error(), i, in.size());
    }
  }
  return shape;
}

BatchStepArgs PackBatch(std::span<const GroupStepInput> in, const StepShape& shape,
                        HostImage& image) {
  std::vector<float> queries;
  std::vector<Cut> cuts;
  std::vector<uint32_t> offsets{0}, anchors;
  std::vector<DeviceSummary> summaries;
  Packed done;
  for (const GroupStepInput& group : in) {
    queries.insert(queries.end(), group.queries.begin(), group.queries.end());
    for (uint32_t g = 0; g < shape.group; ++g) {
      cuts.push_back(group.cuts.empty() ? Cut{} : group.cuts[g]);
    }
    anchors.push_back(static_cast<uint32_t>(group.sinks.count + group.tail.count));
    offsets.push_back(offsets.back() + anchors.back() +
                      static_cast<uint32_t>(group.retrieved.count));
    summaries.push_back(PackSummary(group, image, done));
  }
  BatchStepArgs args;
  args.queries = image.Add<float>(queries);
  args.cuts = image.Add<Cut>(cuts);
  args.row_offsets = image.Add<uint32_t>(offsets);
  args.anchor_counts = image.Add<uint32_t>(anchors);
  args.summaries = image.Add<DeviceSummary>(summaries);
  PackRowExtras(in, image, args);
  args.row_stride = shape.row.bytes();
  args.rows = image.Here();
  for (const GroupStepInput& group : in) {
    for (const RowsView* rows : {&group.sinks, &group.tail, &group.retrieved}) {
      for (size_t i = 0; i < rows->count; ++i) {
        image.AddBytes(rows->key(i), shape.row.key_bytes());
        image.AddBytes(rows->value(i), shape.row.value_bytes());
      }
    }
  }
  return args;
}

Status ExplainGroup(uint32_t word, std::span<const GroupStepInput> in, size_t index) {
  if (const Status s = Explain(word, in[index]); !s.ok()) {
    return InGroup(s.error(), index, in.size());
  }
  return {};
}

}  // namespace prefixd::gpu::internal
