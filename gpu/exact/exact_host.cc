// Implements HostStep::AttendExact: exact attention of host memory's queries and rows.
#include <algorithm>
#include <cstring>

#include "gpu/device/host_image.h"
#include "gpu/device/host_memory.h"
#include "gpu/step/step_host.h"
#include "prefixd/gpu/exact.h"

namespace prefixd::gpu {
namespace {

using internal::Grow;
using internal::HostImage;

Status CheckExact(std::span<const float> queries, uint32_t n, const RowsView& rows,
                  std::span<float> y, std::span<float> lse) {
  if (queries.size() == size_t{n} * rows.shape.key_dim && lse.size() == n &&
      y.size() == size_t{n} * rows.shape.value_dim) {
    return {};
  }
  return InvalidArgument(
      "queries must be [n][key_dim], outputs y [n][value_dim] and lse [n], for n = " +
      std::to_string(n));
}

// Packs the one group of a launch: its queries, its rows or their addresses.
const ExactSource* PackExact(std::span<const float> queries, uint32_t n, const RowsView& rows,
                             bool in_place, HostImage& image) {
  ExactSource source;
  source.queries = image.Add<float>(queries);
  source.n_queries = n;
  source.count = static_cast<uint32_t>(rows.count);
  if (in_place && rows.refs) {
    source.row_addresses = image.AddMade<DeviceRow>(rows.count, [&](std::span<DeviceRow> out) {
      for (size_t i = 0; i < out.size(); ++i) out[i] = {rows.key(i), rows.value(i)};
    });
  } else if (in_place) {
    source.rows = rows.data;
    source.row_stride = rows.stride;
  } else {
    source.rows = image.Here();
    source.row_stride = rows.shape.bytes();
    const size_t key = rows.shape.key_bytes(), value = rows.shape.value_bytes();
    if (!rows.refs && rows.stride == key + value) {
      image.AddBytes(rows.data, rows.count * rows.stride);
    } else {
      for (size_t i = 0; i < rows.count; ++i) {
        image.AddBytes(rows.key(i), key);
        image.AddBytes(rows.value(i), value);
      }
    }
  }
  return image.Add<ExactSource>({&source, 1});
}

}  // namespace

Status HostStep::AttendExact(std::span<const float> queries, uint32_t n_queries,
                             const LayerGeometry& layer, const RowsView& rows, std::span<float> y,
                             std::span<float> lse) {
  PREFIXD_TRY(CheckExact(queries, n_queries, rows, y, lse));
  if (n_queries == 0) return {};
  ExactShape shape;
  shape.n_groups = 1;
  shape.row = rows.shape;
  shape.layer = layer;
  shape.max_queries = n_queries;
  shape.max_rows = static_cast<uint32_t>(std::min<size_t>(rows.count, UINT32_MAX));
  PREFIXD_ASSIGN(const ExactPlan plan, PlanExact(shape, device_));
  PREFIXD_TRY(UseDevice(device_.ordinal));

  // Rows given by their addresses would cross the bus once for every tile of queries, each with its
  // own lookup: with more than one tile they are copied here and cross it once.
  const bool in_place = rows.count > 0 &&
                        (rows.refs == nullptr || n_queries <= plan.tile_queries) &&
                        internal::ReadableByDevice(rows, rows.shape.dtype);
  HostImage measure(nullptr, nullptr);
  (void)PackExact(queries, n_queries, rows, in_place, measure);
  const size_t output_bytes = (y.size() + lse.size() + 1) * sizeof(float);
  PREFIXD_TRY(Grow(staging_, std::max(measure.bytes(), output_bytes)));
  PREFIXD_TRY(Grow(input_, measure.bytes()));
  PREFIXD_TRY(Grow(workspace_, plan.workspace_bytes));
  PREFIXD_TRY(Grow(output_, output_bytes));

  HostImage image(staging_.data(), input_.data());
  ExactArgs args;
  args.sources = PackExact(queries, n_queries, rows, in_place, image);
  args.y = output_.as<float>();
  args.lse = args.y + y.size();
  args.errors = reinterpret_cast<uint32_t*>(args.lse + lse.size());
  args.workspace = workspace_.data();
  args.workspace_bytes = workspace_.bytes();
  PREFIXD_TRY(CopyToDevice(input_.data(), staging_.data(), image.bytes(), stream_.get()));
  const Status launched = LaunchExact(plan, args, stream_.get());
  // A failed launch is waited for too: the staging memory must not be reused while it is being
  // copied.
  if (!launched.ok()) {
    (void)Synchronize(stream_.get());
    return launched;
  }
  PREFIXD_TRY(CopyToHost(staging_.data(), output_.data(), output_bytes, stream_.get()));
  PREFIXD_TRY(Synchronize(stream_.get()));

  const auto* out = reinterpret_cast<const float*>(staging_.data());
  uint32_t word;
  std::memcpy(&word, out + y.size() + lse.size(), sizeof(word));
  PREFIXD_TRY(GroupError(word, 0));
  std::copy_n(out, y.size(), y.data());
  std::copy_n(out + y.size(), lse.size(), lse.data());
  return {};
}

}  // namespace prefixd::gpu
