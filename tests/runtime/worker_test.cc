// Tests a thread of background work: neither what a piece throws nor want of memory ends it.
#include "runtime/work/worker.h"

#include <future>
#include <new>
#include <stdexcept>

#include "tests/support/test.h"

namespace prefixd {
namespace {

TEST(WorkerTest, WhatIsThrownEndsNoThread) {
  std::promise<void> done;
  int taken = 0;
  Worker worker(WorkPriority::kBackground, [&]() -> Worker::Next {
    switch (taken++) {
      case 0:
        throw std::bad_alloc();  // it is asked again
      case 1:
        return {[](const std::stop_token&) { throw std::bad_alloc(); }};
      case 2:
        return {[](const std::stop_token&) { throw std::runtime_error("a piece fails"); }};
      case 3:
        return {[&](const std::stop_token&) { done.set_value(); }};
      default:
        return {};
    }
  });
  EXPECT_EQ(done.get_future().wait_for(std::chrono::seconds(60)), std::future_status::ready);
}

}  // namespace
}  // namespace prefixd
