// HostStep on an emulated device: what it copies, keeps and waits for, beside the kernels.
#include <cmath>
#include <vector>

#include "attention/step/step.h"
#include "gpu/device/host_register.h"
#include "gpu/step/step_host.h"
#include "tests/gpu/emulated/emulated_cuda.h"
#include "tests/gpu/emulated/emulated_device.h"
#include "tests/gpu/exact_cases.h"
#include "tests/gpu/step_cases.h"
#include "tests/support/seed.h"
#include "tests/support/test.h"

namespace prefixd::gpu {
namespace {

using prefixd::testing::Seed;
using testing::ExactCase;
using testing::ExactResult;

TEST(EmulatedHost, RandomBatchesOfSteps) {
  const uint64_t seed = Seed("EmulatedHost.RandomBatchesOfSteps");
  emulated::SetSeed(seed);
  {
    Result<HostStep> step = HostStep::Create();
    ASSERT_TRUE(step.ok()) << step.error().ToString();
    const uint64_t before = emulated::KernelsRun();
    testing::RandomBatches([&](auto in, auto out) { return step->Run(in, out); }, seed, 6, 40, 60);
    EXPECT_GT(emulated::KernelsRun(), before);
    EXPECT_GT(emulated::DeviceBytes(), 0u);
  }
  EXPECT_EQ(emulated::DeviceBytes(), 0u);
}

TEST(EmulatedHost, KeepsSummariesOfASession) {
  const uint64_t seed = Seed("EmulatedHost.KeepsSummariesOfASession");
  emulated::SetSeed(seed);
  Result<HostStep> step = HostStep::Create();
  ASSERT_TRUE(step.ok()) << step.error().ToString();
  testing::KeepsSummaries(
      *step,
      {.shape = {.group = 3, .row = {16, 16, DType::kBf16}, .d_phi = 8, .d_emb = 12},
       .mid = 60,
       .k = 12,
       .sessions = 12,
       .most_bytes = 1 << 18},
      seed);
}

// Each group by itself; every other one's rows are registered, and read where they lie.
Result<ExactResult> EachGroup(HostStep& step, const ExactCase& c) {
  ExactResult out;
  const size_t dv = c.shape.row.value_dim, most = c.shape.max_queries;
  out.y.assign(c.groups.size() * most * dv, 0);
  out.lse.assign(c.groups.size() * most, 0);
  out.errors.assign(c.groups.size(), kGroupOk);
  for (size_t i = 0; i < c.groups.size(); ++i) {
    const ExactCase::Group& group = c.groups[i];
    RowsView rows = group.rows.view();
    std::vector<std::byte> memory(rows.data, rows.data + rows.count * rows.stride);
    rows.data = memory.data();
    std::vector<RowRef> refs;
    for (size_t r = 0; r < rows.count; ++r) refs.push_back({rows.key(r), rows.value(r)});
    if (group.by_address) rows.refs = refs.data();
    const bool registered = i % 2 == 1 && !memory.empty();
    if (registered) PREFIXD_TRY(RegisterHostMemory(memory));
    const auto n = static_cast<uint32_t>(group.queries.size() / c.shape.row.key_dim);
    const Status status = step.AttendExact(group.queries, n, c.shape.layer, rows,
                                           std::span(out.y).subspan(i * most * dv, n * dv),
                                           std::span(out.lse).subspan(i * most, n));
    if (registered) PREFIXD_TRY(UnregisterHostMemory(memory));
    PREFIXD_TRY(status);
  }
  return out;
}

TEST(EmulatedHost, RandomBlocksOfQueriesAttendExactly) {
  const uint64_t seed = Seed("EmulatedHost.RandomBlocksOfQueriesAttendExactly");
  emulated::SetSeed(seed);
  Result<HostStep> step = HostStep::Create();
  ASSERT_TRUE(step.ok()) << step.error().ToString();
  testing::ExactRandomBatches([&](const ExactCase& c) { return EachGroup(*step, c); }, seed, 6, 50,
                              300, 80);
}

TEST(EmulatedHost, WhatTheDeviceSaysIsAnError) {
  Result<HostStep> step = HostStep::Create();
  ASSERT_TRUE(step.ok()) << step.error().ToString();
  testing::Random random(Seed("EmulatedHost.WhatTheDeviceSaysIsAnError"));
  const testing::OwnedRows rows = prefixd::testing::RandomRows(random, {8, 8, DType::kBf16}, 20);
  std::vector<float> q = random.Normals(3 * 8), y(3 * 8), lse(3);
  const auto run = [&] { return step->AttendExact(q, 3, {0.3f, 0, 0}, rows.view(), y, lse); };
  ASSERT_TRUE(run().ok());
  q[9] = NAN;
  const Status poisoned = run();
  ASSERT_FALSE(poisoned.ok());
  EXPECT_EQ(poisoned.error().code, Code::kInvalidArgument);
  q[9] = 0;
  y.pop_back();
  EXPECT_FALSE(run().ok());
  y.push_back(0);
  emulated::FailWith(cudaErrorIllegalAddress);
  const Status lost = run();
  emulated::FailWith(cudaSuccess);
  ASSERT_FALSE(lost.ok());
  EXPECT_EQ(lost.error().code, Code::kInternal);
  EXPECT_TRUE(run().ok());
}

}  // namespace
}  // namespace prefixd::gpu
