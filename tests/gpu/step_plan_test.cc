// Plans, argument checks, error words and probing: what needs no device.
#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "gpu/device/host_image.h"
#include "gpu/step/step_host.h"
#include "gpu/step/step_layout.h"
#include "prefixd/gpu/step.h"
#include "tests/support/test.h"

namespace prefixd::gpu {
namespace {

DeviceInfo Device() {
  DeviceInfo device;
  device.name = "a device";
  device.multiprocessors = 132;
  device.shared_bytes_max = 227 * 1024;
  return device;
}

StepShape Shape() {
  StepShape shape;
  shape.n_groups = 8;
  shape.group = 4;
  shape.row = {128, 128, DType::kBf16};
  shape.layer = {0.088f, 0, 0};
  shape.max_rows = 1400;
  shape.d_phi = shape.d_emb = 128;
  return shape;
}

TEST(SplitRows, CoversEveryRowOnceWithEmptySplitsLast) {
  for (const uint32_t count : {0u, 1u, 15u, 16u, 17u, 100u, 1000u, 16404u, 1u << 20}) {
    for (const uint32_t n_splits : {1u, 2u, 7u, 64u, 256u}) {
      uint32_t next = 0;
      bool ended = false;
      for (uint32_t i = 0; i < n_splits; ++i) {
        const internal::RowSplit split = internal::SplitRows(count, n_splits, i, internal::kTile);
        ASSERT_EQ(split.begin, next) << count << " rows, split " << i << " of " << n_splits;
        ASSERT_GE(split.end, split.begin);
        const bool empty = split.begin == split.end;
        ASSERT_TRUE(empty || !ended) << count << " rows, split " << i << " of " << n_splits;
        ended = ended || empty;
        next = split.end;
      }
      ASSERT_EQ(next, count);
    }
  }
}

TEST(PlanStep, SizesFollowTheShape) {
  const Result<StepPlan> plan = PlanStep(Shape(), Device());
  ASSERT_TRUE(plan.ok()) << plan.error().ToString();
  EXPECT_GT(plan->n_splits, 1u);
  EXPECT_GE(plan->workspace_bytes, size_t{8} * plan->n_splits * 4 * 2 * 128 * sizeof(float));
  StepShape more = Shape();
  more.n_groups = 4096;  // enough groups to fill the device: nothing to split
  const Result<StepPlan> wide = PlanStep(more, Device());
  ASSERT_TRUE(wide.ok());
  EXPECT_EQ(wide->n_splits, 1u);
  StepShape empty = Shape();
  empty.max_rows = 0;
  EXPECT_TRUE(PlanStep(empty, Device()).ok());
}

TEST(PlanStep, LargestShapeFitsAndLargerIsRefused) {
  StepShape shape = Shape();
  shape.group = kMaxGroup;
  shape.row = {kMaxDim, kMaxDim, DType::kF32};
  shape.d_phi = kMaxDim;
  shape.d_emb = kMaxEmbedding;
  shape.max_rows = kMaxRows;
  const Result<StepPlan> largest = PlanStep(shape, Device());
  ASSERT_TRUE(largest.ok()) << largest.error().ToString();
  DeviceInfo small = Device();
  small.shared_bytes_max = 48 * 1024;
  EXPECT_FALSE(PlanStep(shape, small).ok());

  const auto refused = [](const char* what, auto change) {
    StepShape bad = Shape();
    change(bad);
    const Result<StepPlan> plan = PlanStep(bad, Device());
    ASSERT_FALSE(plan.ok()) << what;
    EXPECT_EQ(plan.error().code, Code::kInvalidArgument);
    EXPECT_NE(plan.error().message.find(what), std::string::npos) << plan.error().message;
  };
  refused("group size", [](StepShape& s) { s.group = kMaxGroup + 1; });
  refused("group size", [](StepShape& s) { s.group = 0; });
  refused("n_groups", [](StepShape& s) { s.n_groups = 0; });
  refused("key_dim", [](StepShape& s) { s.row.key_dim = kMaxDim + 1; });
  refused("value_dim", [](StepShape& s) { s.row.value_dim = 0; });
  refused("max_rows", [](StepShape& s) { s.max_rows = kMaxRows + 1; });
  refused("d_phi", [](StepShape& s) { s.d_phi = kMaxDim + 1; });
  refused("d_emb", [](StepShape& s) { s.d_emb = kMaxEmbedding + 1; });
  refused("both", [](StepShape& s) { s.d_emb = 0; });
  refused("rows must be", [](StepShape& s) { s.row.dtype = static_cast<DType>(9); });
}

// Refused before CUDA is asked for anything, so the pointers need not be device memory.
TEST(LaunchStep, RefusesArguments) {
  const Result<StepPlan> plan = PlanStep(Shape(), Device());
  ASSERT_TRUE(plan.ok());
  alignas(16) static std::byte memory[64];
  const auto floats = reinterpret_cast<float*>(memory);
  const auto words = reinterpret_cast<uint32_t*>(memory);
  BatchStepArgs good;
  good.queries = good.y = good.lse = good.rho_z = floats;
  good.row_offsets = good.anchor_counts = good.errors = words;
  good.rows = memory;
  good.row_stride = Shape().row.bytes();
  good.summaries = reinterpret_cast<const DeviceSummary*>(memory);
  good.workspace = memory;
  good.workspace_bytes = plan->workspace_bytes;
  const auto refused = [&](const char* what, auto change) {
    BatchStepArgs bad = good;
    change(bad);
    const Status status = LaunchStep(*plan, bad, nullptr);
    ASSERT_FALSE(status.ok()) << what;
    EXPECT_EQ(status.error().code, Code::kInvalidArgument);
    EXPECT_NE(status.error().message.find(what), std::string::npos) << status.error().message;
  };
  refused("queries is null", [](BatchStepArgs& a) { a.queries = nullptr; });
  refused("summaries is null", [](BatchStepArgs& a) { a.summaries = nullptr; });
  refused("rows is null", [](BatchStepArgs& a) { a.rows = nullptr; });
  refused("row_stride", [](BatchStepArgs& a) { a.row_stride -= 2; });
  refused("row_stride", [](BatchStepArgs& a) { a.row_stride += 1; });
  refused("workspace must be 16-byte aligned",
          [](BatchStepArgs& a) { a.workspace = static_cast<std::byte*>(a.workspace) + 4; });
  refused("the plan needs", [](BatchStepArgs& a) { --a.workspace_bytes; });
  refused("errors is null", [](BatchStepArgs& a) { a.errors = nullptr; });
}

TEST(GroupError, NamesWhatIsWrong) {
  using internal::FaultWord;
  using internal::GroupFault;
  EXPECT_TRUE(GroupError(kGroupOk, 3).ok());
  const auto says = [](uint32_t word, const char* what) {
    const Status status = GroupError(word, 20);
    ASSERT_FALSE(status.ok());
    EXPECT_NE(status.error().message.find(what), std::string::npos) << status.error().message;
  };
  says(FaultWord(GroupFault::kShape, 0), "row counts");
  says(FaultWord(GroupFault::kSummary, 2), "feature maps");
  says(FaultWord(GroupFault::kQuery, 2), "query head 2");
  says(FaultWord(GroupFault::kAddress, 7), "row 7");
  says(FaultWord(GroupFault::kRow, 2 * 19 + 1), "anchor row 19: its value");
  says(FaultWord(GroupFault::kRow, 2 * 20), "retrieved row 0: its key");
  says(FaultWord(GroupFault::kOverflow, 1), "query head 1");
  says(12u << internal::kFaultShift, "unknown error word");
}

TEST(HostImage, MeasuresWhatItWrites) {
  const std::vector<float> matrix = {1, 2, 3, 4, 5, 6};  // [2][3]
  const std::vector<double> wide = {7, 8};
  alignas(16) std::byte memory[128] = {};
  const auto fill = [&](internal::HostImage image) {
    image.AddTransposed(matrix, 2, 3);
    const float* floats = image.AddFloats(wide);
    return std::pair(floats, image.bytes());
  };
  const size_t bytes = fill(internal::HostImage(nullptr, nullptr)).second;
  const auto [floats, written] = fill(internal::HostImage(memory, memory));
  EXPECT_EQ(bytes, written);
  const auto* transposed = reinterpret_cast<const float*>(memory);
  EXPECT_EQ(std::vector<float>(transposed, transposed + 6), (std::vector<float>{1, 4, 2, 5, 3, 6}));
  EXPECT_EQ(floats[0], 7.0f);
  EXPECT_EQ(floats[1], 8.0f);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(floats) % 16, 0u);
}

TEST(ProbeDevice, AnswersWithADeviceOrASentence) {
  const Result<DeviceInfo> device = ProbeDevice();
  if (device.ok()) {
    EXPECT_GT(device->multiprocessors, 0);
    EXPECT_GT(device->shared_bytes_max, 0u);
    EXPECT_TRUE(HostStep::Create().ok());
  } else {
    EXPECT_EQ(device.error().code, Code::kUnavailable);
    EXPECT_NE(device.error().message.find("no usable CUDA device"), std::string::npos);
    const Result<HostStep> step = HostStep::Create();
    ASSERT_FALSE(step.ok());
    EXPECT_EQ(step.error().code, Code::kUnavailable);
  }
  EXPECT_FALSE(ProbeDevice(-1).ok());
  EXPECT_FALSE(ProbeDevice(10000).ok());
}

}  // namespace
}  // namespace prefixd::gpu
