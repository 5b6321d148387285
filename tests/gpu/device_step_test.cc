// The step on a real device, against attention/. Skipped, saying why, where there is none.
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "gpu/device/upload.h"
#include "gpu/step/host_batch.h"
#include "gpu/step/step_host.h"
#include "tests/gpu/device_run.h"
#include "tests/gpu/step_cases.h"
#include "tests/support/seed.h"
namespace prefixd::gpu {
namespace {

using prefixd::testing::Seed;

testing::Runner OnDevice(HostStep& step) {
  return [&step](std::span<const GroupStepInput> in, std::span<const GroupStepOutput> out) {
    return step.Run(in, out);
  };
}

TEST(DeviceStep, RandomBatches) {
  SKIP_WITHOUT_DEVICE();
  Result<HostStep> step = HostStep::Create();
  ASSERT_TRUE(step.ok()) << step.error().ToString();
  testing::RandomBatches(OnDevice(*step), Seed("DeviceStep.RandomBatches"), 40, 256, 700);
}

TEST(DeviceStep, ManyRows) {
  SKIP_WITHOUT_DEVICE();
  Result<HostStep> step = HostStep::Create();
  ASSERT_TRUE(step.ok()) << step.error().ToString();
  testing::Random random(Seed("DeviceStep.ManyRows"));
  const testing::ShapeSpec shape{
      .group = 4, .row = {128, 128, DType::kBf16}, .d_phi = 128, .d_emb = 128};
  for (const EstimatorKind estimator :
       {EstimatorKind::kNone, EstimatorKind::kPhi, EstimatorKind::kMoment}) {
    const testing::Group group =
        testing::MakeGroup(random, shape, {.mid = 20000, .k = 16384, .estimator = estimator});
    testing::ExpectAgrees(OnDevice(*step), std::span(&group, 1));
  }
}

TEST(DeviceStep, HardCases) {
  SKIP_WITHOUT_DEVICE();
  Result<HostStep> step = HostStep::Create();
  ASSERT_TRUE(step.ok()) << step.error().ToString();
  testing::HardCases(OnDevice(*step), Seed("DeviceStep.HardCases"));
}

TEST(DeviceStep, EveryForm) {
  SKIP_WITHOUT_DEVICE();
  Result<HostStep> step = HostStep::Create();
  ASSERT_TRUE(step.ok()) << step.error().ToString();
  testing::EveryForm(OnDevice(*step), Seed("DeviceStep.EveryForm"));
}

TEST(DeviceStep, Refusals) {
  SKIP_WITHOUT_DEVICE();
  Result<HostStep> step = HostStep::Create();
  ASSERT_TRUE(step.ok()) << step.error().ToString();
  testing::Refusals(OnDevice(*step), Seed("DeviceStep.Refusals"));
}

// A batch laid out by hand: rows stay in pinned host memory and are gathered from there by
// address; everything else is on the device.
class PinnedBatch {
 public:
  static Result<PinnedBatch> Make(std::span<const GroupStepInput> in,
                                  std::span<const GroupStepOutput> out) {
    PinnedBatch b;
    PREFIXD_ASSIGN(const DeviceInfo device, ProbeDevice());
    PREFIXD_ASSIGN(const StepShape shape, internal::CheckBatch(in, out));
    PREFIXD_ASSIGN(b.plan, PlanStep(shape, device));
    PREFIXD_ASSIGN(b.stream, OwnedStream::Create());
    PREFIXD_ASSIGN(b.input, internal::UploadImage(
                                [&](internal::HostImage& image) {
                                  b.args = internal::PackBatch(in, shape, image);
                                },
                                b.stream.get()));

    const std::byte* rows = b.input.staging.data() +
                            (static_cast<const std::byte*>(b.args.rows) - b.input.memory.data());
    std::vector<DeviceRow> addresses;
    for (const GroupStepInput& group : in) {
      const size_t n = group.sinks.count + group.tail.count + group.retrieved.count;
      for (size_t i = 0; i < n; ++i) {
        addresses.push_back({rows, rows + shape.row.key_bytes()});
        rows += b.args.row_stride;
      }
    }
    const size_t address_bytes = addresses.size() * sizeof(DeviceRow);
    PREFIXD_ASSIGN(b.addresses, DeviceBuffer::Allocate(address_bytes));
    PREFIXD_TRY(CopyToDevice(b.addresses.data(), addresses.data(), address_bytes, b.stream.get()));
    b.args.row_addresses = b.addresses.as<const DeviceRow>();
    b.args.rows = nullptr;

    b.heads = in.size() * shape.group;
    b.y_floats = b.heads * shape.row.value_dim;
    PREFIXD_ASSIGN(b.output, DeviceBuffer::Allocate((b.y_floats + 3 * b.heads) * 4));
    PREFIXD_ASSIGN(b.workspace, DeviceBuffer::Allocate(b.plan.workspace_bytes));
    b.args.y = b.output.as<float>();
    b.args.lse = b.args.y + b.y_floats;
    b.args.rho_z = b.args.lse + b.heads;
    b.args.errors = reinterpret_cast<uint32_t*>(b.args.rho_z + b.heads);
    b.args.workspace = b.workspace.data();
    b.args.workspace_bytes = b.workspace.bytes();
    PREFIXD_TRY(Synchronize(b.stream.get()));
    return b;
  }

  // Copies the outputs back once the stream has come that far.
  Status Collect(std::span<const GroupStepInput> in, std::span<const GroupStepOutput> out) {
    std::vector<float> host(y_floats + 3 * heads);
    PREFIXD_TRY(CopyToHost(host.data(), output.data(), host.size() * 4, stream.get()));
    PREFIXD_TRY(Synchronize(stream.get()));
    const size_t g = plan.shape.group, dv = plan.shape.row.value_dim;
    for (size_t i = 0; i < in.size(); ++i) {
      uint32_t word;
      std::memcpy(&word, &host[y_floats + 2 * heads + i], sizeof(word));
      PREFIXD_TRY(internal::ExplainGroup(word, in, i));
      std::copy_n(&host[i * g * dv], g * dv, out[i].y.data());
      std::copy_n(&host[y_floats + i * g], g, out[i].lse.data());
      std::copy_n(&host[y_floats + heads + i * g], g, out[i].rho_z.data());
    }
    return {};
  }

  StepPlan plan;
  BatchStepArgs args;
  OwnedStream stream;
  internal::Upload input;
  DeviceBuffer addresses, output, workspace;
  size_t heads = 0, y_floats = 0;
};

TEST(DeviceStep, GathersFromPinnedHostMemory) {
  SKIP_WITHOUT_DEVICE();
  const auto run = [](std::span<const GroupStepInput> in,
                      std::span<const GroupStepOutput> out) -> Status {
    PREFIXD_ASSIGN(PinnedBatch batch, PinnedBatch::Make(in, out));
    PREFIXD_TRY(LaunchStep(batch.plan, batch.args, batch.stream.get()));
    return batch.Collect(in, out);
  };
  testing::RandomBatches(run, Seed("DeviceStep.GathersFromPinnedHostMemory"), 8, 160, 300);
}

TEST(DeviceStep, ReplaysFromAGraph) {
  SKIP_WITHOUT_DEVICE();
  const auto run = [](std::span<const GroupStepInput> in,
                      std::span<const GroupStepOutput> out) -> Status {
    PREFIXD_ASSIGN(PinnedBatch batch, PinnedBatch::Make(in, out));
    const Stream stream = batch.stream.get();
    PREFIXD_TRY(
        testing::ReplayTwice(stream, [&] { return LaunchStep(batch.plan, batch.args, stream); }));
    return batch.Collect(in, out);
  };
  testing::RandomBatches(run, Seed("DeviceStep.ReplaysFromAGraph"), 4, 128, 200);
}

TEST(DeviceStep, KeepsSummariesOfASession) {
  SKIP_WITHOUT_DEVICE();
  Result<HostStep> step = HostStep::Create();
  ASSERT_TRUE(step.ok()) << step.error().ToString();
  testing::KeepsSummaries(
      *step,
      {.shape = {.group = 3, .row = {32, 32, DType::kBf16}, .d_phi = 16, .d_emb = 24},
       .mid = 100,
       .k = 20,
       .sessions = 40,
       .most_bytes = 1 << 20},
      Seed("DeviceStep.KeepsSummariesOfASession"));
}

// An impossible allocation is an error value, and the device goes on working.
TEST(DeviceStep, SurvivesErrors) {
  SKIP_WITHOUT_DEVICE();
  const Result<DeviceBuffer> huge = DeviceBuffer::Allocate(size_t{1} << 60);
  ASSERT_FALSE(huge.ok());
  EXPECT_EQ(huge.error().code, Code::kResourceExhausted) << huge.error().ToString();
  Result<HostStep> step = HostStep::Create();
  ASSERT_TRUE(step.ok()) << step.error().ToString();
  testing::Refusals(OnDevice(*step), Seed("DeviceStep.SurvivesErrors"));
  testing::RandomBatches(OnDevice(*step), 1, 2, 64, 60);
}

}  // namespace
}  // namespace prefixd::gpu
