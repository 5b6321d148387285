// Exact attention on a real device, launched and replayed from a graph. Skipped, saying why, where
// there is none.
#include <vector>

#include "gpu/upload.h"
#include "tests/gpu/device_run.h"
#include "tests/gpu/exact_cases.h"
#include "tests/support/seed.h"

namespace prefixd::gpu {
namespace {

using internal::HostImage;
using testing::ExactCase;
using testing::ExactResult;

const ExactSource* Pack(const ExactCase& c, HostImage& image) {
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
    const DeviceRow* packed = image.Add<DeviceRow>(addresses);
    if (group.by_address) source.row_addresses = packed;
    sources.push_back(source);
  }
  return image.Add<ExactSource>(sources);
}

Result<ExactResult> OnDevice(const ExactCase& c) {
  PREFIXD_ASSIGN(const DeviceInfo device, ProbeDevice());
  PREFIXD_ASSIGN(const ExactPlan plan, PlanExact(c.shape, device));
  PREFIXD_ASSIGN(OwnedStream stream, OwnedStream::Create());
  ExactArgs args;
  PREFIXD_ASSIGN(const auto input,
                 internal::UploadImage([&](HostImage& image) { args.sources = Pack(c, image); },
                                       stream.get()));
  const size_t n = c.shape.n_groups, queries = n * c.shape.max_queries;
  const size_t y_floats = queries * c.shape.row.value_dim;
  PREFIXD_ASSIGN(DeviceBuffer output, DeviceBuffer::Allocate((y_floats + queries + n) * 4));
  PREFIXD_ASSIGN(DeviceBuffer workspace, DeviceBuffer::Allocate(plan.workspace_bytes));
  args.y = output.as<float>();
  args.lse = args.y + y_floats;
  args.errors = reinterpret_cast<uint32_t*>(args.lse + queries);
  args.workspace = workspace.data();
  args.workspace_bytes = workspace.bytes();

  PREFIXD_TRY(
      testing::ReplayTwice(stream.get(), [&] { return LaunchExact(plan, args, stream.get()); }));
  ExactResult out;
  out.y.resize(y_floats);
  out.lse.resize(queries);
  out.errors.resize(n);
  PREFIXD_TRY(testing::Fetch(out.y, args.y, stream.get()));
  PREFIXD_TRY(testing::Fetch(out.lse, args.lse, stream.get()));
  PREFIXD_TRY(testing::Fetch(out.errors, args.errors, stream.get()));
  PREFIXD_TRY(Synchronize(stream.get()));
  return out;
}

TEST(DeviceExact, RandomBatches) {
  SKIP_WITHOUT_DEVICE();
  testing::ExactRandomBatches(OnDevice, prefixd::testing::Seed("DeviceExact.RandomBatches"), 30,
                              256, 3000, 200);
}

TEST(DeviceExact, HardCases) {
  SKIP_WITHOUT_DEVICE();
  testing::ExactHardCases(OnDevice, prefixd::testing::Seed("DeviceExact.HardCases"));
}

}  // namespace
}  // namespace prefixd::gpu
