// The Top-K on a real device, launched and replayed from a graph. Skipped, saying why, where there
// is none.
#include "tests/gpu/device_run.h"
#include "tests/gpu/topk_run.h"
#include "tests/support/seed.h"

namespace prefixd::gpu {
namespace {

using testing::TopKCase;
using testing::TopKResult;

// Once directly, then twice from a graph.
Result<TopKResult> TopKOnDevice(const TopKCase& c) {
  return testing::RunTopK(c, [](Stream stream, const auto& enqueue) -> Status {
    PREFIXD_TRY(enqueue());
    return testing::ReplayTwice(stream, enqueue);
  });
}

TEST(DeviceTopK, RandomBatches) {
  SKIP_WITHOUT_DEVICE();
  testing::TopKRandomBatches(TopKOnDevice, prefixd::testing::Seed("DeviceTopK.RandomBatches"), 40,
                             256, 40000);
}

TEST(DeviceTopK, HardCases) {
  SKIP_WITHOUT_DEVICE();
  testing::TopKHardCases(TopKOnDevice, prefixd::testing::Seed("DeviceTopK.HardCases"));
}

}  // namespace
}  // namespace prefixd::gpu
