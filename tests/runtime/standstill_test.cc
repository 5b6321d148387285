// Tests when work counts as standing still, at made up times.
#include "runtime/session/standstill.h"

#include <chrono>

#include "tests/support/test.h"

namespace prefixd {
namespace {

TEST(StandstillTest, WorkThatAdvancesTakesAsLongAsItLikes) {
  const Standstill::Clock::time_point begun;
  Standstill standstill(std::chrono::seconds(30), begun);
  for (int i = 1; i <= 100; ++i)
    EXPECT_FALSE(standstill.Note(i, begun + std::chrono::seconds(29 * i)));
  EXPECT_FALSE(standstill.Note(100, begun + std::chrono::seconds(2930)));
  EXPECT_TRUE(standstill.Note(100, begun + std::chrono::seconds(2931)));
}

TEST(StandstillTest, WorkThatNeverBeginsOrBeginsAgainStandsStill) {
  const Standstill::Clock::time_point begun;
  Standstill standstill(std::chrono::seconds(30), begun);
  EXPECT_FALSE(standstill.Note(0, begun + std::chrono::seconds(30)));
  EXPECT_TRUE(standstill.Note(0, begun + std::chrono::seconds(31)));
  EXPECT_FALSE(standstill.Note(5, begun + std::chrono::seconds(32)));
  for (int i = 0; i < 30; ++i)
    EXPECT_FALSE(standstill.Note(i % 5, begun + std::chrono::seconds(32 + i)));
  EXPECT_TRUE(standstill.Note(5, begun + std::chrono::seconds(63)));
  EXPECT_FALSE(standstill.Note(6, begun + std::chrono::seconds(64)));
}

}  // namespace
}  // namespace prefixd
