// The Top-K on a real device, launched and replayed from a graph. Skipped, saying why, where there
// is none.
#include <algorithm>
#include <vector>

#include "gpu/upload.h"
#include "tests/gpu/device_run.h"
#include "tests/gpu/topk_cases.h"
#include "tests/support/seed.h"

namespace prefixd::gpu {
namespace {

using internal::HostImage;
using testing::TopKCase;
using testing::TopKResult;

TopKArgs Pack(const TopKCase& c, HostImage& image) {
  TopKArgs args;
  args.queries = image.Add<float>(c.queries);
  args.sources = testing::PackTopK(c, image);
  return args;
}

Result<TopKResult> OnDevice(const TopKCase& c) {
  PREFIXD_ASSIGN(const TopKPlan plan, PlanTopK(c.shape));
  PREFIXD_ASSIGN(OwnedStream stream, OwnedStream::Create());
  TopKArgs args;
  PREFIXD_ASSIGN(
      const auto input,
      internal::UploadImage([&](HostImage& image) { args = Pack(c, image); }, stream.get()));
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
  PREFIXD_TRY(
      testing::ReplayTwice(stream.get(), [&] { return LaunchTopK(plan, args, stream.get()); }));
  std::vector<uint32_t> ids(id_words), counts(n), errors(n);
  std::vector<Cut> cuts(n * G);
  PREFIXD_TRY(testing::Fetch(ids, args.ids, stream.get()));
  PREFIXD_TRY(testing::Fetch(counts, args.counts, stream.get()));
  PREFIXD_TRY(testing::Fetch(errors, args.errors, stream.get()));
  PREFIXD_TRY(testing::Fetch(cuts, args.cuts, stream.get()));
  PREFIXD_TRY(Synchronize(stream.get()));
  TopKResult out{{}, errors, {}};
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
