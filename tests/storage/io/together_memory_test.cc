// Lets allocations of work that several threads share fail, those of the threads among them.
#include <atomic>
#include <vector>

#include "storage/io/together.h"
#include "tests/support/expect_ok.h"
#include "tests/support/failing_new.h"
#include "tests/support/test.h"

namespace prefixd::storage {
namespace {

using testing::FailingNew;
using testing::Victims;

TEST(TogetherMemoryTest, WithoutMemoryForThreadsFewerDoIt) {
  uint32_t refused = 0, fewer = 0;
  for (int64_t allocation = 1;; ++allocation) {
    std::vector<std::atomic<int>> done(100);
    FailingNew::Arm(Victims::kCaller, allocation);
    const Status status = Together(done.size(), 8, [&](size_t i) -> Status {
      ++done[i];
      return {};
    });
    const bool failed = FailingNew::Disarm();
    if (status.ok()) {
      for (const auto& times : done) ASSERT_EQ(times, 1);
    } else {
      EXPECT_CODE(status, Code::kResourceExhausted);
      for (const auto& times : done) ASSERT_EQ(times, 0);
    }
    if (!failed) break;
    ++(status.ok() ? fewer : refused);
  }
  EXPECT_GT(refused, 0u);
  EXPECT_GT(fewer, 0u);
}

}  // namespace
}  // namespace prefixd::storage
