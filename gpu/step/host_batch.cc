#include "gpu/step/host_batch.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "attention/estimators/remainder.h"
#include "gpu/step/pack_summary.h"
#include "gpu/step/step_layout.h"

namespace prefixd::gpu::internal {
namespace {

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
  if (in.estimator == EstimatorKind::kPhi && !in.phi->apart().empty()) {
    return InvalidArgument(
        "a phi cache that keeps rows apart is for the CPU's step (attention/step/step.h)");
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

// Returns the shape that covers a batch; members in which groups must agree are the first group's.
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

// Packs the clusters and stored features of rows, by row, anchors included.
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

void AddRows(const RowsView& rows, HostImage& image) {
  for (size_t i = 0; i < rows.count; ++i) {
    image.AddBytes(rows.key(i), rows.shape.key_bytes());
    image.AddBytes(rows.value(i), rows.shape.value_bytes());
  }
}

// Packs the address of each row: rows that the device reads elsewhere keep their place, the others
// go to the image.
void PackAddresses(std::span<const GroupStepInput> in, const RowShape& shape,
                   const Elsewhere& elsewhere, HostImage& image, BatchStepArgs& args) {
  std::vector<DeviceRow> addresses;
  const auto at = [&](const std::byte* first, size_t count) {  // adjacent rows
    for (size_t i = 0; i < count; ++i) {
      const std::byte* key = first + i * shape.bytes();
      addresses.push_back({key, key + shape.key_bytes()});
    }
  };
  for (size_t i = 0; i < in.size(); ++i) {
    const ResidentGroup* resident = elsewhere.resident.empty() ? nullptr : elsewhere.resident[i];
    const auto add = [&](const RowsView& rows, const std::byte* kept) {
      if (kept) {
        at(kept, rows.count);
      } else if (elsewhere.readable && rows.count > 0 && elsewhere.readable(rows)) {
        for (size_t r = 0; r < rows.count; ++r) addresses.push_back({rows.key(r), rows.value(r)});
      } else {
        at(image.Here(), rows.count);
        AddRows(rows, image);
      }
    };
    add(in[i].sinks, resident ? resident->sinks : nullptr);
    add(in[i].tail, resident ? resident->tail : nullptr);
    add(in[i].retrieved, nullptr);
  }
  args.row_addresses = image.Add<DeviceRow>(addresses);
}

// Packs all rows one behind the other.
void PackRows(std::span<const GroupStepInput> in, const RowShape& shape, HostImage& image,
              BatchStepArgs& args) {
  args.row_stride = shape.bytes();
  args.rows = image.Here();
  for (const GroupStepInput& group : in) {
    for (const RowsView* rows : {&group.sinks, &group.tail, &group.retrieved}) {
      AddRows(*rows, image);
    }
  }
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
                        HostImage& image, const Elsewhere& elsewhere) {
  std::vector<float> queries;
  std::vector<Cut> cuts;
  std::vector<uint32_t> offsets{0}, anchors;
  std::vector<DeviceSummary> summaries;
  PackedMaps maps;
  for (size_t i = 0; i < in.size(); ++i) {
    const GroupStepInput& group = in[i];
    queries.insert(queries.end(), group.queries.begin(), group.queries.end());
    for (uint32_t g = 0; g < shape.group; ++g) {
      cuts.push_back(group.cuts.empty() ? Cut{} : group.cuts[g]);
    }
    anchors.push_back(static_cast<uint32_t>(group.sinks.count + group.tail.count));
    offsets.push_back(offsets.back() + anchors.back() +
                      static_cast<uint32_t>(group.retrieved.count));
    const ResidentGroup* resident = elsewhere.resident.empty() ? nullptr : elsewhere.resident[i];
    DeviceSummary summary = resident ? resident->summary : PackSummary(group, image, maps);
    AddStepParts(group, image, summary);
    summaries.push_back(summary);
  }
  BatchStepArgs args;
  args.queries = image.Add<float>(queries);
  args.cuts = image.Add<Cut>(cuts);
  args.row_offsets = image.Add<uint32_t>(offsets);
  args.anchor_counts = image.Add<uint32_t>(anchors);
  args.summaries = image.Add<DeviceSummary>(summaries);
  PackRowExtras(in, image, args);
  if (elsewhere.resident.empty() && !elsewhere.readable) {
    PackRows(in, shape.row, image, args);
  } else {
    PackAddresses(in, shape.row, elsewhere, image, args);
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
