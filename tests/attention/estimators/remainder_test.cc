#include "attention/estimators/remainder.h"

#include <cmath>

#include "tests/support/infinity.h"
#include "tests/support/test.h"

namespace prefixd {
namespace {

using testing::kInf;

TEST(TiltCut, EachKind) {
  EXPECT_EQ(TiltCut({2, CutKind::kExact}, 0, 1, 100), 2);
  EXPECT_EQ(TiltCut({2, CutKind::kApproximate}, 0, 1, 100), 2);
  EXPECT_NEAR(TiltCut({}, 1, 2, 100), 1 + 2 * std::sqrt(2 * std::log(100.0)), 1e-12);
  EXPECT_EQ(TiltCut({2, CutKind::kNone}, 1, 2, 100), 2) << "a box bound below that holds";
  for (const CutKind kind : {CutKind::kNone, CutKind::kApproximate, CutKind::kExact}) {
    EXPECT_EQ(TiltCut({2, kind}, 1, 2, 1), 1) << "one token: its score is the mean";
  }
}

TEST(ClampToBracket, LowerAlwaysUpperWhereThereIsACut) {
  const double log10 = std::log(10.0);
  EXPECT_NEAR(ClampToBracket(-5, {4, CutKind::kExact}, 1, 10), log10 + 1, 1e-12);
  EXPECT_NEAR(ClampToBracket(50, {4, CutKind::kExact}, 1, 10), log10 + 4, 1e-12);
  EXPECT_EQ(ClampToBracket(50, {4, CutKind::kApproximate}, 1, 10), std::log(10) + 4);
  EXPECT_EQ(ClampToBracket(50, {4, CutKind::kNone}, 1, 10), 50);
  EXPECT_EQ(ClampToBracket(5, {4, CutKind::kExact}, 1, 10), 5);
  EXPECT_NEAR(ClampToBracket(5, {0, CutKind::kExact}, 1, 10), log10 + 1, 1e-12)
      << "the lower side wins";
  EXPECT_EQ(ClampToBracket(5, {kInf, CutKind::kExact}, -kInf, 10), 5) << "mean unknown";
  EXPECT_EQ(ClampToBracket(5, {-kInf, CutKind::kExact}, -kInf, 10), -kInf);
}

}  // namespace
}  // namespace prefixd
