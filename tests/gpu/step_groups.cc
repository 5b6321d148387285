#include "tests/gpu/step_groups.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "index/ranking/group_ranking.h"
#include "prefixd/selection.h"

namespace prefixd::gpu::testing {
namespace {

// Filled with what `input` borrows, except what estimators add.
void Bind(Group& group, const ShapeSpec& shape, EstimatorKind estimator) {
  GroupStepInput& in = group.input;
  in.queries = group.queries;
  in.group = shape.group;
  in.layer = {1 / std::sqrt(static_cast<float>(shape.row.key_dim)), shape.softcap, 0};
  in.sinks = group.sinks.view();
  in.tail = group.tail.view();
  in.retrieved = group.retrieved.view();
  in.cuts = group.cuts;
  in.mid_count = group.mid.count();
  in.estimator = estimator;
  in.moment = group.moment.get();
}

void AddMoment(Group& group, Random& random, const GroupSpec& spec) {
  const RowShape row = group.mid.view().shape;
  MomentSummary moment(row.key_dim, row.value_dim, spec.cross, spec.covariance);
  moment.Add(group.mid.view());
  const bool factored = spec.cross && spec.rank > 0 &&
                        spec.rank < std::min(row.key_dim, row.value_dim) && moment.count() > 0;
  if (factored) {
    std::vector<float> rms = random.Normals(row.key_dim);
    for (float& x : rms) x = std::fabs(x) + 0.1f;
    moment = moment.Factored(spec.rank, rms);
  }
  group.moment = std::make_unique<MomentSummary>(std::move(moment));
}

// Features of the mid region as they are stored, in chunks; the cache is built from them.
void StoreFeatures(Group& group, const ShapeSpec& shape, const GroupSpec& spec,
                   const std::vector<uint32_t>& ids) {
  const RowsView mid = group.mid.view();
  const uint32_t d_phi = shape.d_phi, chunk_rows = 37;
  const FeatureFormat format = *spec.stored;
  std::vector<float> keys;
  for (uint32_t i = 0; i < mid.count; ++i) {
    const std::vector<float> key = group.mid.Key(i);
    keys.insert(keys.end(), key.begin(), key.end());
  }
  std::vector<float> log_phi(mid.count * d_phi), decoded(d_phi);
  group.phi_k->LogPhi(keys, mid.count, log_phi);
  const size_t n_chunks = (mid.count + chunk_rows - 1) / chunk_rows;
  group.feature_m.assign(std::max<size_t>(n_chunks, 1) * d_phi,
                         -std::numeric_limits<float>::infinity());
  for (size_t i = 0; i < log_phi.size(); ++i) {
    float& m = group.feature_m[i / d_phi / chunk_rows * d_phi + i % d_phi];
    m = std::max(m, log_phi[i]);
  }
  const size_t bytes = format.RowBytes(d_phi);
  std::vector<std::byte> codes(mid.count * bytes);
  for (size_t i = 0; i < mid.count; ++i) {
    const std::span<const float> m(&group.feature_m[i / chunk_rows * d_phi], d_phi);
    const std::span<std::byte> row(codes.data() + i * bytes, bytes);
    EncodeFeatures(format, std::span(log_phi).subspan(i * d_phi, d_phi), m, row);
    DecodeFeatures(format, row.data(), decoded);
    for (uint32_t f = 0; f < d_phi; ++f) log_phi[i * d_phi + f] = m[f] + std::log(decoded[f]);
  }
  group.phi->AddFeatures(mid, log_phi);
  for (const uint32_t id : ids) {
    group.features.insert(group.features.end(), codes.begin() + id * bytes,
                          codes.begin() + (id + 1) * bytes);
    group.feature_chunks.push_back(id / chunk_rows);
  }
  if (group.features.empty()) group.features.resize(bytes);
  group.input.features = {format, group.features.data(), bytes, group.feature_m,
                          group.feature_chunks};
}

void AddPhi(Group& group, Random& random, const ShapeSpec& shape, const GroupSpec& spec,
            const std::vector<uint32_t>& ids) {
  using prefixd::testing::RandomFeatureMap;
  const uint32_t dh = shape.row.key_dim;
  group.phi_k =
      std::make_unique<FeatureMap>(RandomFeatureMap(random, dh, shape.d_emb, shape.d_phi));
  for (uint32_t g = 0; g < shape.group && !spec.symmetric; ++g) {
    group.phi_q.push_back(RandomFeatureMap(random, dh, shape.d_emb, shape.d_phi));
  }
  group.phi = std::make_unique<PhiCache>(shape.d_phi, shape.row.value_dim);
  if (spec.stored) {
    StoreFeatures(group, shape, spec, ids);
  } else {
    group.phi->Add(group.mid.view(), *group.phi_k);
  }
  group.input.phi = group.phi.get();
  group.input.phi_form = spec.phi_form;
  group.input.phi_q = group.phi_q;
  group.input.phi_k = group.phi_k.get();
}

void AddClusters(Group& group, Random& random, const ShapeSpec& shape, const GroupSpec& spec,
                 const std::vector<uint32_t>& ids, const std::vector<float>& scores) {
  const RowsView mid = group.mid.view();
  const uint32_t n = std::max(spec.clusters, 1u);
  group.clustering = std::make_unique<Clustering>(shape.row.key_dim,
                                                  random.Normals(size_t{n} * shape.row.key_dim));
  const ClusterContents contents = spec.estimator == EstimatorKind::kCentroid
                                       ? ClusterContents::kCentroids
                                       : ClusterContents::kValues;
  group.clusters =
      std::make_unique<ClusterSummary>(n, shape.row.key_dim, shape.row.value_dim, contents);
  const std::vector<uint16_t> of_rows = group.clustering->Assign(mid);
  group.clusters->Add(mid, of_rows);
  for (const uint32_t id : ids) group.retrieved_clusters.push_back(of_rows[id]);
  GroupStepInput& in = group.input;
  in.clusters = group.clusters.get();
  in.clustering = group.clustering.get();
  if (spec.clusters_given) in.retrieved_clusters = group.retrieved_clusters;
  if (spec.estimator != EstimatorKind::kScan) return;
  std::vector<float> scanned = scores;  // a scan of codes is a little off
  for (float& s : scanned) s += 0.05f * random.Normal();
  group.scan_log_mass.resize(size_t{shape.group} * n);
  SumScan(scanned, shape.group, of_rows, group.cuts, n, group.scan_log_mass);
  for (uint32_t g = 0; g < shape.group; ++g) {
    for (const uint32_t id : ids) group.scan_scores.push_back(scanned[g * mid.count + id]);
  }
  in.scan = {group.scan_log_mass, group.scan_scores, true};
}

}  // namespace

std::string Describe(const Group& group) {
  const GroupStepInput& in = group.input;
  const RowShape row = group.mid.view().shape;
  return "G " + std::to_string(in.group) + ", dims " + std::to_string(row.key_dim) + "+" +
         std::to_string(row.value_dim) + " " + std::string(DTypeName(row.dtype)) + ", rows " +
         std::to_string(in.sinks.count) + "+" + std::to_string(in.tail.count) + "+" +
         std::to_string(in.retrieved.count) + ", mid " + std::to_string(in.mid_count) +
         ", estimator " + std::string(EstimatorName(in.estimator));
}

ShapeSpec RandomShape(Random& random, uint32_t max_dim) {
  ShapeSpec shape;
  shape.group = random.Chance(0.2) ? 16 : random.Int(1, 9);
  shape.row.key_dim = random.Int(1, max_dim);
  shape.row.value_dim = random.Chance(0.5) ? shape.row.key_dim : random.Int(1, max_dim);
  shape.row.dtype = random.AnyDType();
  shape.d_phi = random.Int(1, max_dim);
  shape.d_emb = random.Int(1, max_dim);
  if (random.Chance(0.2)) shape.softcap = static_cast<float>(random.Uniform(1, 30));
  return shape;
}

Group MakeGroup(Random& random, const ShapeSpec& shape, const GroupSpec& spec) {
  using prefixd::testing::RandomRows;
  Group group;
  group.queries = random.Normals(size_t{shape.group} * shape.row.key_dim, shape.query_scale);
  group.sinks = RandomRows(random, shape.row, spec.sinks);
  group.tail = RandomRows(random, shape.row, spec.tail);
  group.mid = RandomRows(random, shape.row, spec.mid);
  if (spec.identical_keys && spec.mid > 0) {
    const std::vector<float> key = group.mid.Key(0);
    for (uint32_t i = 1; i < spec.mid; ++i) group.mid.Set(i, key, group.mid.Value(i));
  }
  Bind(group, shape, spec.estimator);

  std::vector<float> scores(size_t{shape.group} * spec.mid);
  Scores(group.queries, shape.group, group.input.layer, group.mid.view(), scores);
  const Selection selection = SelectByGroupMax(scores, shape.group, spec.mid, spec.k, 0,
                                               spec.cuts != CutSource::kApproximate);
  group.retrieved = group.mid.Pick(selection.ids);
  if (spec.cuts != CutSource::kNone) group.cuts = selection.cuts;

  if (spec.estimator == EstimatorKind::kMoment || spec.with_mean) AddMoment(group, random, spec);
  Bind(group, shape, spec.estimator);
  switch (spec.estimator) {
    case EstimatorKind::kPhi:
      AddPhi(group, random, shape, spec, selection.ids);
      break;
    case EstimatorKind::kCentroid:
    case EstimatorKind::kScan:
      AddClusters(group, random, shape, spec, selection.ids, scores);
      break;
    default:
      break;
  }
  return group;
}

GroupSpec RandomSpec(Random& random, uint32_t max_mid, bool softcap) {
  GroupSpec spec;
  spec.sinks = random.Int(0, 5);
  spec.tail = random.Int(0, 17);
  spec.mid = random.Int(0, max_mid);
  spec.k = random.Chance(0.2) ? 0 : random.Int(0, spec.mid);
  if (!softcap) spec.estimator = static_cast<EstimatorKind>(random.Int(0, kEstimatorKinds - 1));
  spec.cuts = static_cast<CutSource>(random.Int(0, 2));
  spec.with_mean = random.Chance(0.5);
  spec.cross = random.Chance(0.7);
  spec.covariance = random.Chance(0.3);
  spec.rank = random.Chance(0.5) ? 0 : random.Int(1, 8);
  spec.phi_form = random.Chance(0.3) ? PhiForm::kPerFeature : PhiForm::kSigned;
  spec.symmetric = random.Chance(0.3);
  if (random.Chance(0.3)) {
    spec.stored = FeatureFormat{static_cast<uint8_t>(random.Chance(0.5) ? 8 : 16),
                                static_cast<FeatureScale>(random.Int(0, 1))};
  }
  spec.clusters = random.Int(1, 40);
  spec.clusters_given = random.Chance(0.5);
  return spec;
}

}  // namespace prefixd::gpu::testing
