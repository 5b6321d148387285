// Tests the order in which operations leave the queue, and how much of the caps each class gets.
#include "storage/io/io_queue.h"

#include <cerrno>
#include <map>

#include "tests/storage/store_fixture.h"

namespace prefixd::storage {
namespace {

class IoQueueTest : public ::testing::Test {
 protected:
  void Push(IoPriority priority, uint64_t bytes, size_t n = 1) {
    for (; n > 0; --n) {
      ops_.push_back(std::make_unique<IoOp>(IoOp{.priority = priority}));
      batch_.Add(1);
      queue_.Push({ops_.back().get(), &batch_, bytes, 0, 0});
    }
  }

  std::optional<IoPriority> Pop() {
    const auto queued = queue_.Pop(done_);
    if (!queued) return std::nullopt;
    inflight_.push_back(*queued);
    return queued->op->priority;
  }

  // Ends the operation that has been in flight longest.
  void Finish(int64_t result = 0) {
    QueuedOp queued = inflight_.front();
    inflight_.pop_front();
    queue_.Done(queued, result, done_);
  }

  IoLimits limits_{1 << 20, 8};
  // With these settings events, not the clock, hold scrub back.
  ScrubManners manners_{.quiet = std::chrono::microseconds(0),
                        .longest_hold = std::chrono::hours(1)};
  IoQueue queue_{limits_, manners_};
  IoBatch batch_;
  Completions done_;
  std::vector<std::unique_ptr<IoOp>> ops_;
  std::deque<QueuedOp> inflight_;
};

TEST_F(IoQueueTest, UrgentFirst) {
  Push(IoPriority::kScrub, 4096);
  Push(IoPriority::kWrite, 4096);
  Push(IoPriority::kCommit, 4096);
  Push(IoPriority::kStepRead, 4096);
  EXPECT_EQ(Pop(), IoPriority::kStepRead);
  EXPECT_EQ(Pop(), IoPriority::kCommit);
  EXPECT_EQ(Pop(), IoPriority::kWrite);
  EXPECT_EQ(Pop(), std::nullopt);
  Finish();
  EXPECT_EQ(Pop(), IoPriority::kScrub);
  EXPECT_EQ(Pop(), std::nullopt);
}

TEST_F(IoQueueTest, ScrubIsHeldWhileStepsRead) {
  using std::chrono::hours;
  const auto now = IoBatch::Clock::now;
  IoQueue queue(limits_, {.quiet = hours(1), .longest_hold = hours(2)});
  std::deque<IoOp> ops;
  const auto push = [&](IoPriority priority) {
    ops.push_back({.priority = priority});
    queue.Push({&ops.back(), &batch_, 4096, 0, 0});
  };
  EXPECT_EQ(queue.HeldUntil(), std::nullopt);
  push(IoPriority::kScrub);
  EXPECT_EQ(queue.HeldUntil(), std::nullopt);  // no step has read yet
  ASSERT_TRUE(queue.Pop(done_));
  push(IoPriority::kStepRead);
  push(IoPriority::kScrub);
  auto step = queue.Pop(done_);
  ASSERT_TRUE(step);
  EXPECT_EQ(step->op->priority, IoPriority::kStepRead);
  EXPECT_TRUE(queue.Ready());  // a thread must wait for it
  EXPECT_FALSE(queue.Pop(done_));
  ASSERT_TRUE(queue.HeldUntil());
  EXPECT_GT(*queue.HeldUntil(), now() + hours(1));  // a step in flight: it may take any time
  queue.Done(*step, 4096, done_);
  EXPECT_FALSE(queue.Pop(done_));
  ASSERT_TRUE(queue.HeldUntil());
  EXPECT_LE(*queue.HeldUntil(), now() + hours(1));  // quiet since it ended
  push(IoPriority::kWrite);                         // others go on
  ASSERT_TRUE(queue.Pop(done_));
  EXPECT_FALSE(queue.Pop(done_));
}

// No operation is in flight then whose end would make a thread look again.
TEST_F(IoQueueTest, WhatIsHeldBehindExpiredOperationsIsNotForgotten) {
  using std::chrono::hours;
  IoQueue queue(limits_, {.quiet = hours(1), .longest_hold = hours(2)});
  IoOp step{.priority = IoPriority::kStepRead}, late{.priority = IoPriority::kCommit};
  IoOp scrub{.priority = IoPriority::kScrub};
  IoBatch expired;
  expired.SetDeadline(IoBatch::Clock::now() - hours(1));
  queue.Push({&step, &batch_, 4096, 0, 0});
  auto ran = queue.Pop(done_);
  ASSERT_TRUE(ran);
  queue.Done(*ran, 4096, done_);
  queue.Push({&late, &expired, 4096, 0, 0});
  queue.Push({&scrub, &batch_, 4096, 0, 0});
  EXPECT_FALSE(queue.Pop(done_));
  EXPECT_EQ(late.result, -ETIMEDOUT);
  EXPECT_TRUE(queue.HeldUntil());
  EXPECT_TRUE(queue.Ready());
}

TEST_F(IoQueueTest, ScrubIsNotHeldForEver) {
  using std::chrono::hours, std::chrono::microseconds;
  IoQueue queue(limits_, {.quiet = hours(1), .longest_hold = microseconds(0)});
  std::deque<IoOp> ops;
  for (const IoPriority priority : {IoPriority::kStepRead, IoPriority::kScrub}) {
    ops.push_back({.priority = priority});
    queue.Push({&ops.back(), &batch_, 4096, 0, 0});
    const auto next = queue.Pop(done_);
    ASSERT_TRUE(next);
    EXPECT_EQ(next->op->priority, priority);
  }
}

TEST_F(IoQueueTest, AFloodLeavesRoomForStepReads) {
  for (const auto& [write_bytes, scrub_bytes] : std::vector<std::pair<uint64_t, uint64_t>>{
           {4096, 4096}, {256 << 10, 4096}, {4096, 1 << 20}}) {
    IoQueue fresh(limits_);
    std::vector<QueuedOp> taken;
    const auto push = [&](IoPriority priority, uint64_t bytes) {
      ops_.push_back(std::make_unique<IoOp>(IoOp{.priority = priority}));
      fresh.Push({ops_.back().get(), &batch_, bytes, 0, 0});
    };
    for (int i = 0; i < 100; ++i) {
      push(IoPriority::kWrite, write_bytes);
      push(IoPriority::kScrub, scrub_bytes);
    }
    while (const auto queued = fresh.Pop(done_)) taken.push_back(*queued);
    EXPECT_FALSE(taken.empty());
    EXPECT_LE(taken.size(), 6u);
    // Step reads go at once, and before all queued operations.
    for (size_t i = 0; i < 2; ++i) {
      push(IoPriority::kStepRead, 4096);
      const auto queued = fresh.Pop(done_);
      ASSERT_TRUE(queued);
      EXPECT_EQ(queued->op->priority, IoPriority::kStepRead);
    }
  }
}

TEST_F(IoQueueTest, AStepReadWaitsForNoMoreThanWhatIsInFlight) {
  Push(IoPriority::kWrite, 64 << 10, 1000);
  Push(IoPriority::kScrub, 64 << 10, 1000);
  while (Pop()) {
  }
  Push(IoPriority::kStepRead, 4096, 30);
  // Among the next operations the flood gets only the share that ageing gives it: none, for 30
  // pages.
  std::map<IoPriority, int> left;
  for (int i = 0; i < 30;) {
    if (const auto next = Pop()) {
      ++left[*next];
      ++i;
    } else {
      Finish();
    }
  }
  EXPECT_EQ(left[IoPriority::kStepRead], 30);
}

TEST_F(IoQueueTest, NobodyStarves) {
  // Step reads never run out; every other class has work too.
  Push(IoPriority::kCommit, 4096, 2000);
  Push(IoPriority::kWrite, 64 << 10, 2000);
  Push(IoPriority::kScrub, 16 << 10, 2000);
  std::array<uint64_t, kIoPriorities> bytes{};
  for (int i = 0; i < 20000; ++i) {
    Push(IoPriority::kStepRead, 4096);
    while (const auto next = Pop()) {
      bytes[static_cast<size_t>(*next)] += inflight_.back().bytes;
    }
    Finish();
  }
  const uint64_t all = bytes[0] + bytes[1] + bytes[2] + bytes[3];
  for (size_t p = 1; p < kIoPriorities; ++p) {
    EXPECT_GT(bytes[p], all / 25) << p;
    EXPECT_LT(bytes[p], all / 12) << p;
  }
}

TEST_F(IoQueueTest, LargeOnesAreNotPassedForEver) {
  // A write as large as the whole window waits among step reads that always fill it.
  Push(IoPriority::kWrite, 1 << 20);
  Push(IoPriority::kStepRead, 128 << 10, 1000);
  bool written = false;
  for (int i = 0; i < 400 && !written; ++i) {
    while (const auto next = Pop()) written |= *next == IoPriority::kWrite;
    Finish();
  }
  EXPECT_TRUE(written);
}

TEST_F(IoQueueTest, InterruptedOnesAreTriedAgainSixteenTimes) {
  for (const int error : {EINTR, EAGAIN}) {
    Push(IoPriority::kStepRead, 4096);
    int tries = 0;
    while (Pop()) {
      ++tries;
      Finish(-error);
    }
    EXPECT_EQ(tries, 17);
    EXPECT_EQ(ops_.back()->result, -error);
  }
  Push(IoPriority::kStepRead, 4096);
  ASSERT_TRUE(Pop());
  inflight_.front().cancel_error = ETIMEDOUT;
  Finish(-EINTR);
  EXPECT_EQ(ops_.back()->result, -ETIMEDOUT);
  done_.Tell();
  EXPECT_TRUE(batch_.WaitUntil(IoBatch::Clock::now()));
}

}  // namespace
}  // namespace prefixd::storage
