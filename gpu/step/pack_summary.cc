#include "gpu/step/pack_summary.h"

#include <span>
#include <vector>

#include "prefixd/gpu/phi_pack.h"

namespace prefixd::gpu::internal {
namespace {

DeviceQueryMap PackQueryMap(const FeatureMap& map, HostImage& image, PackedMaps& done) {
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

DeviceKeyMap PackKeyMap(const FeatureMap& map, HostImage& image, PackedMaps& done) {
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

void PackPhi(const GroupStepInput& in, HostImage& image, PackedMaps& done, DeviceSummary& d) {
  d.phi_m = image.Add(in.phi->m());
  d.phi_u = image.Add(in.phi->u());
  d.phi_t = image.Add(in.phi->t());
  d.phi_q_shared = in.phi_q.empty();
  std::vector<DeviceQueryMap> phi_q;
  for (const FeatureMap& map : in.phi_q) phi_q.push_back(PackQueryMap(map, image, done));
  if (d.phi_q_shared) phi_q.push_back(PackQueryMap(*in.phi_k, image, done));
  d.phi_q = image.Add<DeviceQueryMap>(phi_q);
  if (in.features.data != nullptr) return;  // nothing is recomputed
  const DeviceKeyMap phi_k = PackKeyMap(*in.phi_k, image, done);
  d.phi_k = image.Add(std::span(&phi_k, 1));
}

void PackClusters(const GroupStepInput& in, HostImage& image, DeviceSummary& d) {
  const ClusterSummary& clusters = *in.clusters;
  d.n_clusters = clusters.size();
  const std::vector<uint32_t> counts(clusters.counts().begin(), clusters.counts().end());
  d.cluster_counts = image.Add<uint32_t>(counts);
  d.cluster_values = image.AddFloats(clusters.mean_values());
  if (in.estimator == EstimatorKind::kScan) return;
  d.cluster_keys = image.AddFloats(clusters.mean_keys());
  d.cluster_spreads = image.AddFloats(clusters.spreads());
}

// Returns whether the estimate is merged into y and lse, or only reported. An input without
// merge_estimate merges it.
template <typename Input>
bool MergesEstimate(const Input& in) {
  if constexpr (requires { in.merge_estimate; }) {
    return in.merge_estimate;
  } else {
    return true;
  }
}

}  // namespace

bool UsesClusters(EstimatorKind kind) {
  return kind == EstimatorKind::kCentroid || kind == EstimatorKind::kScan;
}

EstimatorKind Effective(const GroupStepInput& in) {
  return in.retrieved.count == in.mid_count ? EstimatorKind::kNone : in.estimator;
}

DeviceSummary PackSummary(const GroupStepInput& in, HostImage& image, PackedMaps& maps) {
  DeviceSummary d;
  d.estimator = Effective(in);
  if (d.estimator == EstimatorKind::kNone) return d;
  if (in.moment) d.mean_key = image.AddFloats(in.moment->mean_key());
  if (d.estimator == EstimatorKind::kMoment) PackMoment(*in.moment, image, d);
  if (d.estimator == EstimatorKind::kPhi) PackPhi(in, image, maps, d);
  if (UsesClusters(d.estimator)) PackClusters(in, image, d);
  return d;
}

void AddStepParts(const GroupStepInput& in, HostImage& image, DeviceSummary& d) {
  d.estimator = Effective(in);
  d.mid_count = static_cast<uint32_t>(in.mid_count);
  d.merge_estimate = MergesEstimate(in);
  d.phi_form = in.phi_form;
  if (d.estimator == EstimatorKind::kPhi && in.features.data != nullptr) {
    d.feature_format = in.features.format;
    d.feature_m = image.Add(in.features.m);
    d.feature_chunks = static_cast<uint32_t>(in.features.m.size() / in.phi->d_phi());
  }
  if (d.estimator == EstimatorKind::kScan) {
    d.scan_log_mass = image.Add(in.scan.log_mass);
    d.scan_retrieved_scores = image.Add(in.scan.retrieved_scores);
  }
}

ResidentGroup PackResident(const GroupStepInput& in, HostImage& image) {
  PackedMaps maps;
  ResidentGroup group;
  group.summary = PackSummary(in, image, maps);
  const auto rows = [&](const RowsView& view) {
    const std::byte* at = image.Here();
    for (size_t i = 0; i < view.count; ++i) image.AddBytes(view.key(i), view.shape.bytes());
    return at;
  };
  group.sinks = rows(in.sinks);
  group.tail = rows(in.tail);
  return group;
}

}  // namespace prefixd::gpu::internal
