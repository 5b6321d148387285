#include "base/rows/stream_copy.h"

#include <cstring>
#include <random>
#include <vector>

#include "tests/support/seed.h"
#include "tests/support/test.h"

namespace prefixd {
namespace {

TEST(StreamCopy, CopiesAnyLengthAndAlignment) {
  std::mt19937_64 rng(testing::Seed("StreamCopy"));
  std::vector<std::byte> from(8192), to(8192), expected;
  for (std::byte& b : from) b = std::byte(rng());
  for (int i = 0; i < 2000; ++i) {
    const size_t a = rng() % 200, b = rng() % 200, n = rng() % (rng() % 2 ? 300 : 7900);
    to.assign(to.size(), std::byte{0});
    expected = to;
    std::copy_n(from.begin() + static_cast<ptrdiff_t>(a), n,
                expected.begin() + static_cast<ptrdiff_t>(b));
    StreamCopy(to.data() + b, from.data() + a, n);
    ASSERT_EQ(to, expected) << a << " " << b << " " << n;
  }
}

}  // namespace
}  // namespace prefixd
