// Exact attention on a real device, launched and replayed from a graph. Skipped, saying why, where
// there is none.
#include "tests/gpu/device_run.h"
#include "tests/gpu/exact_run.h"
#include "tests/support/seed.h"

namespace prefixd::gpu {
namespace {

using testing::ExactCase;
using testing::ExactResult;

Result<ExactResult> ExactOnDevice(const ExactCase& c) {
  return testing::RunExact(
      c, [](Stream stream, const auto& enqueue) { return testing::ReplayTwice(stream, enqueue); });
}

TEST(DeviceExact, RandomBatches) {
  SKIP_WITHOUT_DEVICE();
  testing::ExactRandomBatches(ExactOnDevice, prefixd::testing::Seed("DeviceExact.RandomBatches"),
                              30, 256, 3000, 200);
}

TEST(DeviceExact, HardCases) {
  SKIP_WITHOUT_DEVICE();
  testing::ExactHardCases(ExactOnDevice, prefixd::testing::Seed("DeviceExact.HardCases"));
}

}  // namespace
}  // namespace prefixd::gpu
