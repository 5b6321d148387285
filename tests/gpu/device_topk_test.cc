// The Top-K on a real device, launched and replayed from a graph. Skipped, saying why, where there
// is none.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <vector>

#include "gpu/cuda_status.h"
#include "gpu/device_buffer.h"
#include "gpu/host_image.h"
#include "tests/gpu/topk_cases.h"
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
using testing::TopKCase;
using testing::TopKResult;

TopKArgs Pack(const TopKCase& c, HostImage& image) {
  std::vector<TopKSource> sources;
  for (const TopKCase::Group& group : c.groups) {
    TopKSource source;
    const RowsView rows = group.rows.view();
    source.count = static_cast<uint32_t>(rows.count);
    source.key_stride = rows.stride;
    source.first_id = group.first_id;
    source.k = group.k;
    source.keys = image.Here();
    image.AddBytes(rows.data, rows.count * rows.stride);
    source.codes = image.Add<std::byte>(group.codes);
    if (group.book) {
      const DeviceCodeBook book{
          static_cast<uint32_t>(group.book->components()), image.Add<float>(group.book->centre),
          image.Add<uint8_t>(group.book->digits), image.Add<uint16_t>(group.book->directions)};
      source.book = image.Add(std::span(&book, 1));
    }
    sources.push_back(source);
  }
  TopKArgs args;
  args.queries = image.Add<float>(c.queries);
  args.sources = image.Add<TopKSource>(sources);
  return args;
}

Result<TopKResult> OnDevice(const TopKCase& c) {
  PREFIXD_ASSIGN(const TopKPlan plan, PlanTopK(c.shape));
  PREFIXD_ASSIGN(OwnedStream stream, OwnedStream::Create());
  HostImage measure(nullptr, nullptr);
  Pack(c, measure);
  PREFIXD_ASSIGN(PinnedBuffer staging, PinnedBuffer::Allocate(measure.bytes()));
  PREFIXD_ASSIGN(DeviceBuffer input, DeviceBuffer::Allocate(measure.bytes()));
  HostImage image(staging.data(), input.data());
  TopKArgs args = Pack(c, image);
  PREFIXD_TRY(CopyToDevice(input.data(), staging.data(), image.bytes(), stream.get()));
  const size_t n = c.shape.n_groups, G = c.shape.group;
  const size_t id_words = n * c.shape.max_k, cut_words = n * G * sizeof(Cut) / 4;
  PREFIXD_ASSIGN(DeviceBuffer output, DeviceBuffer::Allocate((id_words + cut_words + 2 * n) * 4));
  PREFIXD_ASSIGN(DeviceBuffer workspace, DeviceBuffer::Allocate(plan.workspace_bytes));
  args.ids = output.as<uint32_t>();
  args.counts = args.ids + id_words;
  args.errors = args.counts + n;
  args.cuts = reinterpret_cast<Cut*>(args.errors + n);
  args.workspace = workspace.data();
  args.workspace_bytes = workspace.bytes();

  // Once directly, then twice from a graph.
  PREFIXD_TRY(LaunchTopK(plan, args, stream.get()));
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  PREFIXD_TRY(CudaStatus(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeThreadLocal),
                         "beginning a capture"));
  const Status launched = LaunchTopK(plan, args, stream.get());
  PREFIXD_TRY(CudaStatus(cudaStreamEndCapture(stream.get(), &graph), "ending a capture"));
  PREFIXD_TRY(launched);
  PREFIXD_TRY(CudaStatus(cudaGraphInstantiate(&exec, graph, 0), "instantiating"));
  for (int i = 0; i < 2; ++i) {
    PREFIXD_TRY(CudaStatus(cudaGraphLaunch(exec, stream.get()), "launching a graph"));
  }
  std::vector<uint32_t> ids(id_words), counts(n), errors(n);
  std::vector<Cut> cuts(n * G);
  const auto fetch = [&](auto& to, const void* from) {
    return CopyToHost(to.data(), static_cast<const std::byte*>(from), to.size() * sizeof(to[0]),
                      stream.get());
  };
  PREFIXD_TRY(fetch(ids, args.ids));
  PREFIXD_TRY(fetch(counts, args.counts));
  PREFIXD_TRY(fetch(errors, args.errors));
  PREFIXD_TRY(fetch(cuts, args.cuts));
  PREFIXD_TRY(Synchronize(stream.get()));
  PREFIXD_TRY(CudaStatus(cudaGraphExecDestroy(exec), "destroying a graph"));
  PREFIXD_TRY(CudaStatus(cudaGraphDestroy(graph), "destroying a graph"));
  TopKResult out;
  out.errors = errors;
  for (size_t g = 0; g < n; ++g) {
    Selection selection;
    const auto first = ids.begin() + static_cast<std::ptrdiff_t>(g * c.shape.max_k);
    selection.ids.assign(first, first + std::min(counts[g], c.shape.max_k));
    selection.cuts.assign(cuts.begin() + static_cast<std::ptrdiff_t>(g * G),
                          cuts.begin() + static_cast<std::ptrdiff_t>((g + 1) * G));
    out.groups.push_back(std::move(selection));
  }
  return out;
}

TEST(DeviceTopK, RandomBatches) {
  SKIP_WITHOUT_DEVICE();
  testing::TopKRandomBatches(OnDevice, prefixd::testing::Seed("DeviceTopK.RandomBatches"), 40, 256,
                             40000);
}

TEST(DeviceTopK, HardCases) {
  SKIP_WITHOUT_DEVICE();
  testing::TopKHardCases(OnDevice, prefixd::testing::Seed("DeviceTopK.HardCases"));
}

}  // namespace
}  // namespace prefixd::gpu
