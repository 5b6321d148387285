#include "attention/reference/diagnostics.h"

#include <limits>
#include <vector>

#include "tests/support/test.h"

namespace prefixd {
namespace {

TEST(NormalizedEntropy, OneForUniformZeroForOneHot) {
  EXPECT_NEAR(NormalizedEntropy(std::vector<float>(50, 3.0f)), 1.0, 1e-12);
  std::vector<float> peaked(50, 0.0f);
  peaked[7] = 200;
  EXPECT_NEAR(NormalizedEntropy(peaked), 0.0, 1e-12);
  EXPECT_EQ(NormalizedEntropy({}), 0.0);
  EXPECT_EQ(NormalizedEntropy(std::vector<float>{5.0f}), 0.0);
}

TEST(NormalizedEntropy, KnownDistributionAtAnyShift) {
  // p = (1/2, 1/4, 1/4): 1.5 bits of log2(3).
  for (float shift : {0.0f, 500.0f, -500.0f}) {
    const float ln2 = 0.69314718f;
    const std::vector<float> scores = {shift, shift - ln2, shift - ln2};
    EXPECT_NEAR(NormalizedEntropy(scores), 1.5 / 1.584962500721156, 1e-5);
  }
  const float gone = -std::numeric_limits<float>::infinity();
  EXPECT_NEAR(NormalizedEntropy(std::vector<float>{1, 1, gone, gone}), 0.5, 1e-12);
}

TEST(RelativeL1, IsRelativeToTheSecond) {
  EXPECT_EQ(RelativeL1(std::vector<float>{1, -2}, std::vector<float>{1, -2}), 0.0);
  EXPECT_NEAR(RelativeL1(std::vector<float>{1, 1}, std::vector<float>{2, -2}), 1.0, 1e-12);
  EXPECT_GT(RelativeL1(std::vector<float>{1e-6f}, std::vector<float>{0}), 1e5);
}

}  // namespace
}  // namespace prefixd
