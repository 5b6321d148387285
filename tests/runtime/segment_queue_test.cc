// Tests the queue of segments: what goes behind others.
#include "runtime/work/segment_queue.h"

#include <array>
#include <atomic>
#include <chrono>

#include "tests/support/expect_ok.h"
#include "tests/support/test.h"

namespace prefixd {
namespace {

using storage::SegmentId;

TEST(SegmentQueueTest, OneThatLacksMemoryLetsOthersGo) {
  const SegmentId starved{{1}}, other{{2}};
  std::atomic<bool> others_done{false};
  BackgroundPace pace(100, 2);
  SegmentQueue queue("summaries", pace, [&](const SegmentId& id, WorkProgress&) -> Status {
    if (id == other) others_done = true;
    if (others_done) return {};
    return Error{Code::kResourceExhausted, "the tenant's memory is used up", 1};
  });
  queue.Enqueue(starved);
  queue.Enqueue(other);
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  const auto patient = [&](uint64_t, uint64_t, std::string_view) {
    return std::chrono::steady_clock::now() < until;
  };
  const std::array<SegmentId, 2> both = {starved, other};
  ASSERT_OK(queue.Wait(both, patient));
  EXPECT_TRUE(others_done);
}

TEST(SegmentQueueTest, WhatFailedForAPassingReasonIsTriedAgain) {
  using std::chrono::minutes, std::chrono::steady_clock;
  const SegmentId passing{{1}}, lasting{{2}};
  std::atomic<int> tries{0}, lasting_tries{0};
  BackgroundPace pace(100, 2);
  SegmentQueue queue("summaries", pace, [&](const SegmentId& id, WorkProgress&) -> Status {
    if (id == lasting) {
      ++lasting_tries;
      return Error{Code::kCorrupt, "a page does not verify"};
    }
    if (++tries <= 2) return Error{Code::kUnavailable, "the disk does not answer"};
    return {};
  });
  queue.Enqueue(lasting);
  queue.Enqueue(passing);
  const auto forever = [](uint64_t, uint64_t, std::string_view) { return true; };
  ASSERT_OK(queue.WaitIdle(forever));
  EXPECT_EQ(queue.Get(passing).state, IngestState::kFailed);
  const auto retry_after = [&](minutes after) {
    queue.RetryFailed(steady_clock::now() + after);
    ASSERT_OK(queue.WaitIdle(forever));
  };
  retry_after(minutes(0));
  EXPECT_EQ(tries, 1);  // not at once
  retry_after(minutes(1));
  EXPECT_EQ(tries, 2);
  retry_after(minutes(1));
  EXPECT_EQ(tries, 2);  // twice as long
  retry_after(minutes(2));
  EXPECT_EQ(tries, 3);
  EXPECT_EQ(queue.Get(passing).state, IngestState::kReady);
  retry_after(minutes(600));
  EXPECT_EQ(tries, 3);
  EXPECT_EQ(lasting_tries, 1);
}

}  // namespace
}  // namespace prefixd
