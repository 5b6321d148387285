// A case of exact attention through LaunchExact, on the device that there is, emulated or not.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "gpu/device/launch_memory.h"
#include "gpu/device/upload.h"
#include "tests/gpu/exact_cases.h"
#include "tests/gpu/launcher.h"

namespace prefixd::gpu::testing {

inline const ExactSource* PackExactCase(const ExactCase& c, internal::HostImage& image) {
  std::vector<ExactSource> sources;
  for (const ExactCase::Group& group : c.groups) {
    const RowsView rows = group.rows.view();
    ExactSource source;
    source.queries = image.Add<float>(group.queries);
    source.n_queries = static_cast<uint32_t>(group.queries.size() / c.shape.row.key_dim);
    source.count = static_cast<uint32_t>(rows.count);
    source.row_stride = rows.stride;
    const std::byte* at = image.Here();
    source.rows = at;
    image.AddBytes(rows.data, rows.count * rows.stride);
    std::vector<DeviceRow> addresses;
    for (size_t i = 0; i < rows.count; ++i) {
      const std::byte* key = at + i * rows.stride;
      addresses.push_back({key, key + rows.shape.key_bytes()});
    }
    if (group.null_row < addresses.size()) addresses[group.null_row].value = nullptr;
    const DeviceRow* packed = image.Add<DeviceRow>(addresses);
    if (group.by_address) source.row_addresses = packed;
    sources.push_back(source);
  }
  return image.Add<ExactSource>(sources);
}

// shared_most: as on a device that gives a block no more shared memory than this.
inline Result<ExactResult> RunExact(const ExactCase& c, const Launcher& launch,
                                    size_t shared_most = SIZE_MAX) {
  PREFIXD_ASSIGN(DeviceInfo device, ProbeDevice());
  device.shared_bytes_max = std::min(device.shared_bytes_max, shared_most);
  PREFIXD_ASSIGN(const ExactPlan plan, PlanExact(c.shape, device));
  PREFIXD_ASSIGN(OwnedStream stream, OwnedStream::Create());
  ExactArgs args;
  const auto pack = [&](internal::HostImage& image) { args.sources = PackExactCase(c, image); };
  PREFIXD_ASSIGN(const auto input, internal::UploadImage(pack, stream.get()));
  PREFIXD_ASSIGN(const auto memory, internal::AllocateFor(plan, args));
  ExactResult out;
  out.lse.resize(size_t{c.shape.n_groups} * c.shape.max_queries);
  out.y.resize(out.lse.size() * c.shape.row.value_dim);
  out.errors.resize(c.shape.n_groups);
  PREFIXD_TRY(Poison(args.y, out.y.size(), stream.get()));
  PREFIXD_TRY(Poison(args.lse, out.lse.size(), stream.get()));
  PREFIXD_TRY(launch(stream.get(), [&] { return LaunchExact(plan, args, stream.get()); }));

  PREFIXD_TRY(Fetch(out.y, args.y, stream.get()));
  PREFIXD_TRY(Fetch(out.lse, args.lse, stream.get()));
  PREFIXD_TRY(Fetch(out.errors, args.errors, stream.get()));
  PREFIXD_TRY(Synchronize(stream.get()));
  return out;
}

}  // namespace prefixd::gpu::testing
