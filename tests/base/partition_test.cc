#include "prefixd/partition.h"

#include "tests/support/test.h"

namespace prefixd {
namespace {

TEST(Partition, CoversThePrefixInOrderAtEveryLength) {
  for (uint32_t sinks : {0u, 1u, 4u}) {
    for (uint32_t tail : {0u, 1u, 16u}) {
      for (uint32_t n = 0; n < 40; ++n) {
        const Partition p = Partition::Of(n, {sinks, tail});
        EXPECT_EQ(p.sink.begin, 0u);
        EXPECT_EQ(p.sink.end, p.mid.begin);
        EXPECT_EQ(p.mid.end, p.tail.begin);
        EXPECT_EQ(p.tail.end, n);
        EXPECT_EQ(p.anchor_count() + p.mid.size(), n);
        EXPECT_EQ(p.sink.size(), std::min(n, sinks));
        EXPECT_EQ(p.mid.size(), n > sinks + tail ? n - sinks - tail : 0);
      }
    }
  }
}

TEST(TokenRange, ContainsItsBeginAndNotItsEnd) {
  const TokenRange range{3, 5};
  EXPECT_FALSE(range.contains(2));
  EXPECT_TRUE(range.contains(3));
  EXPECT_TRUE(range.contains(4));
  EXPECT_FALSE(range.contains(5));
}

}  // namespace
}  // namespace prefixd
