// Tests checks: they stay on in every build type, name what was broken, and evaluate once.
#include "base/check.h"

#include <cstdint>

#include "tests/support/test.h"

namespace prefixd {
namespace {

TEST(Check, HoldsAndEvaluatesOnce) {
  int evaluated = 0;
  PREFIXD_CHECK(++evaluated == 1);
  PREFIXD_CHECK(++evaluated == 2, evaluated);
  EXPECT_EQ(evaluated, 2);
}

#ifdef PREFIXD_HAVE_GTEST
TEST(CheckDeathTest, SaysWhatIsBrokenAndEndsTheProcess) {
  const uint64_t page = 7;
  const uint32_t n = 3;
  EXPECT_DEATH(PREFIXD_CHECK(page < n, page, n),
               "check_test.cc:[0-9]+: broken invariant: page < n \\(page, n = 7, 3\\)");
  EXPECT_DEATH(PREFIXD_CHECK(n == 4), "broken invariant: n == 4\n");
}
#endif

}  // namespace
}  // namespace prefixd
