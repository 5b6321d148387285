// Tests that the pool begins no piece of a call that is to end, on whatever thread.
#include "runtime/work/thread_pool.h"

#include <atomic>

#include "base/call_scope.h"
#include "tests/support/expect_ok.h"

namespace prefixd {
namespace {

CallLimits By(const CallCanceller& canceller) { return CallLimits::Of(0, &canceller); }

TEST(ThreadPoolTest, OneThreadBeginsNothingAfterACancellation) {
  ThreadPool pool(1);
  CallCanceller canceller;
  const CallScope scope(By(canceller));
  int begun = 0;
  EXPECT_CODE(pool.ParallelFor(100,
                               [&](size_t) -> Status {
                                 if (++begun == 3) canceller.Cancel();
                                 return {};
                               }),
              Code::kCancelled);
  EXPECT_EQ(begun, 3);
  EXPECT_CODE(pool.ParallelFor(1,
                               [&](size_t) -> Status {
                                 ++begun;
                                 return {};
                               }),
              Code::kCancelled);
  EXPECT_EQ(begun, 3);
}

// Each thread takes a piece; the pieces end together, behind the cancellation, and no thread takes
// another one.
TEST(ThreadPoolTest, NoThreadBeginsAnythingAfterACancellation) {
  constexpr uint32_t kThreads = 4;
  for (const WorkPriority priority : {WorkPriority::kStep, WorkPriority::kBackground}) {
    ThreadPool pool(kThreads);
    CallCanceller canceller;
    const CallScope scope(By(canceller));
    std::atomic<uint32_t> begun{0}, ended_well{0};
    EXPECT_CODE(pool.ParallelFor(
                    1000,
                    [&](size_t) -> Status {
                      ++begun;
                      while (begun < kThreads) std::this_thread::yield();
                      canceller.Cancel();
                      ++ended_well;
                      return {};  // a piece that asks for nothing
                    },
                    priority),
                Code::kCancelled);
    EXPECT_EQ(begun, kThreads);
    EXPECT_EQ(ended_well, kThreads);
  }
}

}  // namespace
}  // namespace prefixd
