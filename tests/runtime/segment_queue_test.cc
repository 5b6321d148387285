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

}  // namespace
}  // namespace prefixd
