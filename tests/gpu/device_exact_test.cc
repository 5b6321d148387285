// Exact attention on a real device, launched and replayed from a graph. Skipped, saying why, where
// there is none.
#include <cuda_runtime_api.h>

#include <vector>

#include "gpu/cuda_status.h"
#include "gpu/device_buffer.h"
#include "gpu/host_image.h"
#include "tests/gpu/exact_cases.h"
#include "tests/support/seed.h"
#include "tests/support/test.h"

#define SKIP_WITHOUT_DEVICE()                                                     \
  if (const auto probed = ProbeDevice(); !probed.ok()) {                          \
    GTEST_SKIP() << "skipped: no CUDA device (" << probed.error().message << ")"; \
  }

namespace prefixd::gpu {
namespace {

using internal::CudaStatus;
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
  HostImage measure(nullptr, nullptr);
  Pack(c, measure);
  PREFIXD_ASSIGN(PinnedBuffer staging, PinnedBuffer::Allocate(measure.bytes()));
  PREFIXD_ASSIGN(DeviceBuffer input, DeviceBuffer::Allocate(measure.bytes()));
  HostImage image(staging.data(), input.data());
  ExactArgs args;
  args.sources = Pack(c, image);
  PREFIXD_TRY(CopyToDevice(input.data(), staging.data(), image.bytes(), stream.get()));
  const size_t n = c.shape.n_groups, queries = n * c.shape.max_queries;
  const size_t y_floats = queries * c.shape.row.value_dim;
  PREFIXD_ASSIGN(DeviceBuffer output, DeviceBuffer::Allocate((y_floats + queries + n) * 4));
  PREFIXD_ASSIGN(DeviceBuffer workspace, DeviceBuffer::Allocate(plan.workspace_bytes));
  args.y = output.as<float>();
  args.lse = args.y + y_floats;
  args.errors = reinterpret_cast<uint32_t*>(args.lse + queries);
  args.workspace = workspace.data();
  args.workspace_bytes = workspace.bytes();

  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  PREFIXD_TRY(CudaStatus(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeThreadLocal),
                         "beginning a capture"));
  const Status launched = LaunchExact(plan, args, stream.get());
  PREFIXD_TRY(CudaStatus(cudaStreamEndCapture(stream.get(), &graph), "ending a capture"));
  PREFIXD_TRY(launched);
  PREFIXD_TRY(CudaStatus(cudaGraphInstantiate(&exec, graph, 0), "instantiating"));
  for (int i = 0; i < 2; ++i) {
    PREFIXD_TRY(CudaStatus(cudaGraphLaunch(exec, stream.get()), "launching a graph"));
  }
  ExactResult out;
  out.y.resize(y_floats);
  out.lse.resize(queries);
  out.errors.resize(n);
  const auto fetch = [&](auto& to, const void* from) {
    return CopyToHost(to.data(), static_cast<const std::byte*>(from), to.size() * sizeof(to[0]),
                      stream.get());
  };
  PREFIXD_TRY(fetch(out.y, args.y));
  PREFIXD_TRY(fetch(out.lse, args.lse));
  PREFIXD_TRY(fetch(out.errors, args.errors));
  PREFIXD_TRY(Synchronize(stream.get()));
  PREFIXD_TRY(CudaStatus(cudaGraphExecDestroy(exec), "destroying a graph"));
  PREFIXD_TRY(CudaStatus(cudaGraphDestroy(graph), "destroying a graph"));
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
