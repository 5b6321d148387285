// Implements HostStep::AttendExact: exact attention of host memory's queries and rows.
#include <algorithm>
#include <cstring>
#include <vector>

#include "gpu/device/host_image.h"
#include "gpu/device/host_memory.h"
#include "gpu/exact/exact_layout.h"
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

// How the kernel comes by its rows: it reads them where they lie; they are copied from there as
// they are; they are gathered in the image.
enum class Path { kInPlace, kCopied, kGathered };

// Rows that lie in host memory would cross the bus once for every tile of queries: with more than
// one tile they are brought here and cross it once.
Path PathOf(const RowsView& rows, bool one_tile) {
  if (rows.count == 0 || !internal::ReadableByDevice(rows, rows.shape.dtype)) {
    return Path::kGathered;
  }
  if (one_tile) return Path::kInPlace;
  return rows.refs == nullptr ? Path::kCopied : Path::kGathered;
}

// Packs the one group of a launch: its queries, its rows or their addresses. copied: where rows
// that are copied will be.
const ExactSource* PackExact(std::span<const float> queries, uint32_t n, const RowsView& rows,
                             Path path, const std::byte* copied, HostImage& image) {
  const bool in_place = path == Path::kInPlace;
  ExactSource source;
  source.queries = image.Add<float>(queries);
  source.n_queries = n;
  source.count = static_cast<uint32_t>(rows.count);
  if (in_place && rows.refs) {
    source.row_addresses = image.AddMade<DeviceRow>(rows.count, [&](std::span<DeviceRow> out) {
      for (size_t i = 0; i < out.size(); ++i) out[i] = {rows.key(i), rows.value(i)};
    });
  } else if (path != Path::kGathered) {
    source.rows = in_place ? rows.data : copied;
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

  const Path path = PathOf(rows, n_queries <= plan.tile_queries);
  HostImage measure(nullptr, nullptr);
  (void)PackExact(queries, n_queries, rows, path, nullptr, measure);
  const size_t copied_at = (measure.bytes() + 255) / 256 * 256;
  const size_t copied_bytes = path == Path::kCopied ? rows.count * rows.stride : 0;
  const size_t output_bytes = (y.size() + lse.size() + 1) * sizeof(float);
  PREFIXD_TRY(Grow(staging_, std::max(measure.bytes(), output_bytes)));
  PREFIXD_TRY(Grow(input_, copied_at + copied_bytes));
  PREFIXD_TRY(Grow(workspace_, plan.workspace_bytes));
  PREFIXD_TRY(Grow(output_, output_bytes));

  HostImage image(staging_.data(), input_.data());
  ExactArgs args;
  args.sources = PackExact(queries, n_queries, rows, path, input_.data() + copied_at, image);
  args.y = output_.as<float>();
  args.lse = args.y + y.size();
  args.errors = reinterpret_cast<uint32_t*>(args.lse + lse.size());
  args.workspace = workspace_.data();
  args.workspace_bytes = workspace_.bytes();
  PREFIXD_TRY(CopyToDevice(input_.data(), staging_.data(), image.bytes(), stream_.get()));
  Status launched;
  if (path == Path::kCopied) {
    // The last row may end before its stride does.
    const size_t bytes = copied_bytes - rows.stride + rows.shape.bytes();
    launched = CopyToDevice(input_.data() + copied_at, rows.data, bytes, stream_.get());
  }
  if (launched.ok()) launched = LaunchExact(plan, args, stream_.get());
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
