// Tests work that several threads share.
#include "storage/io/together.h"

#include <atomic>
#include <new>
#include <vector>

#include "tests/support/expect_ok.h"
#include "tests/support/test.h"

namespace prefixd::storage {
namespace {

TEST(TogetherTest, EveryPieceIsDoneOnce) {
  for (const size_t n : {0, 1, 3, 1000}) {
    for (const size_t threads : {0, 1, 4, 16}) {
      std::vector<std::atomic<int>> done(n);
      ASSERT_OK(Together(n, threads, [&](size_t i) -> Status {
        ++done[i];
        return {};
      }));
      for (const auto& times : done) ASSERT_EQ(times, 1);
    }
  }
}

TEST(TogetherTest, AfterAnErrorNoPieceBegins) {
  std::atomic<size_t> begun{0};
  const Status status = Together(1000000, 4, [&](size_t i) -> Status {
    ++begun;
    if (i < 10) return {};
    return Error{Code::kIo, "piece"};
  });
  EXPECT_CODE(status, Code::kIo);
  EXPECT_GE(begun, 11u);
  EXPECT_LE(begun, 14u);  // one of each thread at most
}

TEST(TogetherTest, WantOfMemoryIsAnError) {
  const Status status = Together(8, 4, [](size_t i) -> Status {
    if (i == 5) throw std::bad_alloc();
    return {};
  });
  EXPECT_CODE(status, Code::kResourceExhausted);
}

}  // namespace
}  // namespace prefixd::storage
