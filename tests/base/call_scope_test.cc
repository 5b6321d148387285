#include "base/call_scope.h"

#include <future>
#include <thread>

#include "base/interrupted_writes.h"
#include "tests/support/expect_ok.h"

namespace prefixd {
namespace {

using Clock = CallLimits::Clock;

CallLimits Late() {
  CallLimits limits;
  limits.deadline = Clock::now();
  return limits;
}

TEST(CallScope, EndsByItsDeadlineOrItsCanceller) {
  EXPECT_TRUE(CheckCall().ok());
  CallCanceller canceller;
  canceller.Cancel();  // an earlier call's
  {
    const CallScope scope(CallLimits::Of(0, &canceller));
    EXPECT_TRUE(CheckCall().ok());
    canceller.Cancel();
    EXPECT_CODE(CheckCall(), Code::kCancelled);
  }
  EXPECT_TRUE(CheckCall().ok());
  {
    const CallScope scope(CallLimits::Of(3600 * 1000, &canceller));
    EXPECT_TRUE(CheckCall().ok());
  }
  const CallScope scope(Late());
  EXPECT_CODE(CheckCall(), Code::kDeadlineExceeded);
}

TEST(CallScope, APartKeepsToTheLimitsOfTheWhole) {
  CallCanceller whole, part;
  const CallScope outer(CallLimits::Of(0, &whole));
  {
    const CallScope inner(CallLimits::Of(0, &part));
    part.Cancel();
    EXPECT_CODE(CheckCall(), Code::kCancelled);
  }
  EXPECT_TRUE(CheckCall().ok());  // the part's cancellation concerns the part alone
  const CallScope inner(CallLimits::Of(3600 * 1000, nullptr));
  EXPECT_LT(CarriedScope::Current()->Earliest(), Clock::time_point::max());
  whole.Cancel();
  EXPECT_CODE(CheckCall(), Code::kCancelled);
  const CarriedScope none(nullptr);
  EXPECT_TRUE(CheckCall().ok());
}

TEST(CallScope, BelongsToItsThreadUntilAnotherTakesItOver) {
  const CallScope scope(Late());
  const CallLimits* const limits = CarriedScope::Current();
  std::thread([&] {
    EXPECT_TRUE(CheckCall().ok());
    const CarriedScope carried(limits);
    EXPECT_CODE(CheckCall(), Code::kDeadlineExceeded);
  }).join();
}

TEST(CallScope, WhoWaitsForALockCanEnd) {
  CallMutex mutex;
  ASSERT_TRUE(mutex.Lock().ok());
  CallCanceller canceller;
  auto waiting = std::async(std::launch::async, [&] {
    const CallScope scope(CallLimits::Of(0, &canceller));
    const auto lock = CallLock::Take(mutex);
    return lock.ok() ? Status() : Status(lock.error());
  });
  auto patient = std::async(std::launch::async, [&] { return CallLock::Take(mutex).ok(); });
  canceller.Cancel();
  // The call may not have begun when it was cancelled; it has if it waits now.
  while (waiting.wait_for(std::chrono::milliseconds(1)) != std::future_status::ready) {
    canceller.Cancel();
  }
  EXPECT_CODE(waiting.get(), Code::kCancelled);
  mutex.Unlock();
  EXPECT_TRUE(patient.get());
  EXPECT_TRUE(CallLock::Take(mutex).ok());  // released by the other
}

TEST(InterruptedWrites, GoOnWhereTheyEnded) {
  InterruptedWrites writes;
  EXPECT_EQ(writes.Resume(0, {10, 20}), 10u);
  writes.Note(0, {10, 20}, 14);
  writes.Note(1, {10, 20}, 10);  // nothing was written
  EXPECT_EQ(writes.Resume(0, {10, 20}), 14u);
  EXPECT_EQ(writes.Resume(1, {10, 20}), 10u);
  EXPECT_EQ(writes.Resume(0, {10, 21}), 10u);  // another write
  writes.Note(0, {10, 20}, 17);
  EXPECT_EQ(writes.Resume(0, {10, 20}), 17u);
  writes.Note(0, {10, 20}, 20);
  EXPECT_EQ(writes.Resume(0, {10, 20}), 10u);  // it ended
}

}  // namespace
}  // namespace prefixd
