// Tests how background work is held back: how long a thread rests after what the scheduler says,
// and that nobody waits for a rest.
#include "runtime/work/background_pace.h"

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "tests/support/test.h"

namespace prefixd {
namespace {

constexpr uint64_t kMs = 1'000'000;

TEST(BackgroundPaceTest, RestsInProportionToWhatOthersHad) {
  const BackgroundPace pace(10, 2);
  // It had a core half of the time: a tenth for both threads together is a twentieth for each.
  EXPECT_EQ(pace.RestAfter({10 * kMs, 10 * kMs}), 180 * kMs);
  EXPECT_EQ(pace.RestAfter({10 * kMs, 2 * kMs}), 36 * kMs);
  // One that mostly waited is not the one in the way.
  EXPECT_EQ(pace.RestAfter({1 * kMs, 100 * kMs}), 18 * kMs);
  // On idle cores it waits now and then for others that wake.
  EXPECT_EQ(pace.RestAfter({100 * kMs, 1 * kMs}), 0u);
  EXPECT_EQ(pace.RestAfter({}), 0u);
  EXPECT_EQ(pace.RestAfter({1000 * kMs, 1000 * kMs}), 5000 * kMs);
  EXPECT_EQ(BackgroundPace(50, 1).RestAfter({10 * kMs, 10 * kMs}), 10 * kMs);
  EXPECT_EQ(BackgroundPace(100, 2).RestAfter({10 * kMs, 10 * kMs}), 0u);
}

TEST(BackgroundPaceTest, TheSchedulerTellsHowLongAThreadRan) {
  const SchedTimes before = SchedTimes::OfThisThread();
  if (before.ran_ns == 0) GTEST_SKIP() << "this kernel does not tell";
  SchedTimes now = before;
  for (uint64_t i = 0; i < 1'000'000'000 && now.ran_ns == before.ran_ns; ++i) {
    now = SchedTimes::OfThisThread();
  }
  EXPECT_GT(now.ran_ns, before.ran_ns);
  EXPECT_GE(now.waited_ns, before.waited_ns);
  // Of the thread that asks, not of the process.
  SchedTimes other{~0ull, 0};
  std::thread([&] { other = SchedTimes::OfThisThread(); }).join();
  EXPECT_LT(other.ran_ns, now.ran_ns);
}

TEST(BackgroundPaceTest, TheMachineTellsHowLongItsCoresWorked) {
  const CoreTimes before = CoreTimes::Now();
  if (before.machine_ns == 0) GTEST_SKIP() << "this kernel does not tell";
  CoreTimes now = before;
  while (now.process_ns < before.process_ns + 100 * kMs) now = CoreTimes::Now();
  EXPECT_GE(now.machine_ns, before.machine_ns + 50 * kMs);  // this process's time is in it
}

// Threads that work on one core and rest at one per cent end all the same, as soon as it is
// stopped.
TEST(BackgroundPaceTest, StopEndsEveryRest) {
  BackgroundPace pace(1, 4);
  std::atomic<bool> done{false};
  std::atomic<uint64_t> rests{0};
  std::vector<std::thread> team;
  for (int i = 0; i < 4; ++i) {
    team.emplace_back([&] {
      while (!done) {
        pace.Rest();
        ++rests;
      }
    });
  }
  while (rests < 1000) std::this_thread::yield();
  {
    const BackgroundPace::Hurry hurry(&pace), none(nullptr);
    const uint64_t before = rests;
    while (rests < before + 1000) std::this_thread::yield();
  }
  pace.Stop();
  done = true;
  for (std::thread& thread : team) thread.join();
}

}  // namespace
}  // namespace prefixd
