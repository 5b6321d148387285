#include "gpu/host_batch.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "gpu/step_layout.h"

namespace prefixd::gpu::internal {
namespace {

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
  const EstimatorKind estimator = Effective(in);
  if (in.estimator == EstimatorKind::kNone) return {};
  if (in.estimator != EstimatorKind::kMoment && in.estimator != EstimatorKind::kPhi) {
    return InvalidArgument("estimator 'auto' must be resolved before a step");
  }
  if (in.layer.softcap > 0) {
    return InvalidArgument("a layer with a softcap attends exactly or by selection only");
  }
  if (in.moment_form != MomentForm::kDirect || in.phi_form != PhiForm::kSigned ||
      in.features.data != nullptr ||
      (in.moment && (in.moment->cross_rank() > 0 || in.moment->has_covariance()))) {
    return InvalidArgument(
        "the CUDA step has the direct moment form with C whole or not at all, and the signed phi "
        "form with recomputed features; use compute = cpu for others");
  }
  if (in.retrieved.count > in.mid_count || in.mid_count > UINT32_MAX) {
    return InvalidArgument(std::to_string(in.retrieved.count) + " retrieved rows; the mid region " +
                           "has " + std::to_string(in.mid_count));
  }
  const auto nan = [](const Cut& cut) { return std::isnan(cut.score); };
  if (std::ranges::any_of(in.cuts, nan)) return InvalidArgument("a cut is NaN");
  if (estimator == EstimatorKind::kMoment && !in.moment) {
    return InvalidArgument("the moment estimator needs a moment summary");
  }
  if (estimator != EstimatorKind::kNone && in.moment &&
      (in.moment->key_dim() != shape.row.key_dim || in.moment->value_dim() != shape.row.value_dim ||
       in.moment->count() != in.mid_count)) {
    return InvalidArgument("the moment summary and the mid region disagree in count or dimensions");
  }
  if (estimator != EstimatorKind::kPhi) return {};
  if (!in.phi || !in.phi_k || in.phi_q.size() != in.group) {
    return InvalidArgument("the phi estimator needs a cache, phi_k and one phi_q per query head");
  }
  const auto fits = [&](const FeatureMap& map) {
    return map.in_dim == shape.row.key_dim && map.d_phi == shape.d_phi;
  };
  if (in.phi->value_dim() != shape.row.value_dim || in.phi->d_phi() != shape.d_phi ||
      in.phi->count() != in.mid_count || !fits(*in.phi_k) || !std::ranges::all_of(in.phi_q, fits)) {
    return InvalidArgument("the phi cache, its maps and the rows disagree in count or dimensions");
  }
  PREFIXD_TRY(in.phi_k->Validate());
  for (const FeatureMap& map : in.phi_q) PREFIXD_TRY(map.Validate());
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
    if (Effective(group) != EstimatorKind::kPhi) continue;
    if (group.phi_k) {
      shape.d_phi = group.phi_k->d_phi;
      shape.d_emb = std::max(shape.d_emb, group.phi_k->d_emb);
    }
    for (const FeatureMap& map : group.phi_q) shape.d_emb = std::max(shape.d_emb, map.d_emb);
  }
  return shape;
}

using MapAddresses = std::map<const FeatureMap*, DeviceFeatureMap>;

DeviceFeatureMap PackMap(const FeatureMap& map, HostImage& image, MapAddresses& done) {
  if (const auto found = done.find(&map); found != done.end()) return found->second;
  DeviceFeatureMap d;
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
  return done[&map] = d;
}

DeviceSummary PackSummary(const GroupStepInput& in, HostImage& image, MapAddresses& maps) {
  DeviceSummary d;
  d.estimator = Effective(in);
  d.mid_count = static_cast<uint32_t>(in.mid_count);
  if (d.estimator == EstimatorKind::kNone) return d;
  if (in.moment) d.mean_key = image.AddFloats(in.moment->mean_key());
  if (d.estimator == EstimatorKind::kMoment) {
    d.key_m2 = image.AddFloats(in.moment->key_m2());
    d.mean_value = image.AddFloats(in.moment->mean_value());
    if (in.moment->has_cross()) d.cross = image.AddFloats(in.moment->cross());
    return d;
  }
  d.phi_m = image.Add(in.phi->m());
  d.phi_u = image.Add(in.phi->u());
  d.phi_t = image.Add(in.phi->t());
  std::vector<DeviceFeatureMap> phi_q;
  for (const FeatureMap& map : in.phi_q) phi_q.push_back(PackMap(map, image, maps));
  d.phi_q = image.Add<DeviceFeatureMap>(phi_q);
  const DeviceFeatureMap phi_k = PackMap(*in.phi_k, image, maps);
  d.phi_k = image.Add(std::span(&phi_k, 1));
  return d;
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
  MapAddresses maps;
  for (const GroupStepInput& group : in) {
    queries.insert(queries.end(), group.queries.begin(), group.queries.end());
    for (uint32_t g = 0; g < shape.group; ++g) {
      cuts.push_back(group.cuts.empty() ? Cut{} : group.cuts[g]);
    }
    anchors.push_back(static_cast<uint32_t>(group.sinks.count + group.tail.count));
    offsets.push_back(offsets.back() + anchors.back() +
                      static_cast<uint32_t>(group.retrieved.count));
    summaries.push_back(PackSummary(group, image, maps));
  }
  BatchStepArgs args;
  args.queries = image.Add<float>(queries);
  args.cuts = image.Add<Cut>(cuts);
  args.row_offsets = image.Add<uint32_t>(offsets);
  args.anchor_counts = image.Add<uint32_t>(anchors);
  args.summaries = image.Add<DeviceSummary>(summaries);
  args.row_stride = shape.row.bytes();
  args.rows = image.Here();
  for (const GroupStepInput& group : in) {
    for (const RowsView* rows : {&group.sinks, &group.tail, &group.retrieved}) {
      for (size_t i = 0; i < rows->count; ++i) image.AddBytes(rows->key(i), shape.row.bytes());
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
