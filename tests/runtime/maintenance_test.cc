// Tests the maintenance thread: tasks run again and again, errors do not stop it, stopping is
// prompt.
#include "runtime/work/maintenance.h"

#include <atomic>
#include <semaphore>

#include "tests/support/test.h"

namespace prefixd {
namespace {

using std::chrono::hours;
using std::chrono::milliseconds;

TEST(MaintenanceTest, EveryTaskRunsAgainEvenAfterErrors) {
  std::counting_semaphore<> good(0), bad(0);
  Maintenance maintenance({{"good", milliseconds(1),
                            [&](const std::stop_token&) {
                              good.release();
                              return Status();
                            }},
                           {"bad", milliseconds(2), [&](const std::stop_token&) -> Status {
                              bad.release();
                              return Error{Code::kIo, "out of order"};
                            }}});
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(good.try_acquire_for(std::chrono::seconds(30)));
    EXPECT_TRUE(bad.try_acquire_for(std::chrono::seconds(30)));
  }
}

TEST(MaintenanceTest, StoppingDoesNotWaitForAPeriodAndReachesTheTaskUnderWay) {
  std::binary_semaphore running(0);
  std::atomic<int> runs{0};
  Maintenance maintenance({{"rare", hours(10000),
                            [&](const std::stop_token&) {
                              ++runs;
                              return Status();
                            }},
                           {"long", milliseconds(1), [&](const std::stop_token& stop) {
                              running.release();
                              while (!stop.stop_requested()) std::this_thread::yield();
                              return Status();
                            }}});
  EXPECT_TRUE(running.try_acquire_for(std::chrono::seconds(30)));
  maintenance.Stop();
  maintenance.Stop();
  EXPECT_EQ(runs, 0);
}

TEST(MaintenanceTest, NothingToDo) { Maintenance maintenance({}); }

}  // namespace
}  // namespace prefixd
