// Counts the allocations of client and daemon together while steps go through a ring. The store
// allocates nothing, so nobody may.
#include "tests/daemon/connections/ring_fixture.h"
#include "tests/support/count_allocations.h"

namespace prefixd::testing {
namespace {

class RingAllocationsTest : public RingTest {
 protected:
  // Returns the fewest allocations in one of some rounds of steps: other threads of the daemon may
  // have timers.
  uint64_t OfWarmSteps(RemoteStore& store, uint32_t batch, bool infos) {
    std::vector<std::shared_ptr<Session>> sessions;
    std::vector<Tensors> tensors(batch);
    std::vector<StepInfo> reports(batch);
    std::vector<StepRequest> steps;
    for (uint32_t i = 0; i < batch; ++i) {
      sessions.push_back(Attach(store));
      steps.push_back({sessions[i].get(),
                       0,
                       tensors[i].q,
                       tensors[i].y,
                       tensors[i].lse,
                       infos ? &reports[i] : nullptr,
                       {}});
    }
    // Warm is whoever may serve a step.
    for (int i = 0; i < 300; ++i) store.StepBatch(steps);
    uint64_t fewest = UINT64_MAX;
    for (int round = 0; round < 20 && fewest > 0; ++round) {
      const uint64_t before = allocations.load();
      for (int i = 0; i < 50; ++i) store.StepBatch(steps);
      fewest = std::min(fewest, allocations.load() - before);
    }
    for (const StepRequest& step : steps) EXPECT_OK(step.status);
    return fewest;
  }
};

TEST_F(RingAllocationsTest, WarmStepsMakeNone) {
  const auto spinning = daemon_->Connect({.spin_us = 500});
  for (RemoteStore* store : {client_.get(), spinning.get()}) {
    for (const uint32_t batch : {1u, 8u}) {
      EXPECT_EQ(OfWarmSteps(*store, batch, false), 0u);
      EXPECT_EQ(OfWarmSteps(*store, batch, true), 0u);
    }
  }
  // Messages are counted, too, so the count works.
  const auto messages = daemon_->Connect({.shared_memory = false});
  EXPECT_GT(OfWarmSteps(*messages, 1, false), 0u);
}

}  // namespace
}  // namespace prefixd::testing
