// Tests copies of parts of rows against a copy byte by byte.
#include "base/rows/copy_rows.h"

#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

#include "tests/support/seed.h"
#include "tests/support/test.h"

namespace prefixd {
namespace {

TEST(CopyRows, PartsGoWhereTheyAreWanted) {
  std::mt19937_64 rng(testing::Seed("CopyRows"));
  std::vector<std::byte> from(4096);
  for (std::byte& b : from) b = std::byte(rng());
  const std::vector<uint32_t> sizes = {1, 2, 63, 64, 65, 128, 200, 256, 300};
  for (int round = 0; round < 3000; ++round) {
    RowCopy copy;
    copy.bytes = sizes[rng() % sizes.size()];
    copy.step = copy.bytes + static_cast<uint32_t>(rng() % 40);
    copy.n = 1 + static_cast<uint32_t>(rng() % ((from.size() - copy.bytes) / copy.step));
    copy.from = from.data() + rng() % (from.size() - (copy.n - 1) * copy.step - copy.bytes + 1);
    copy.to_step = copy.bytes + rng() % 70;
    std::vector<uint16_t> places(copy.n + rng() % 5);
    std::iota(places.begin(), places.end(), 0);
    std::ranges::shuffle(places, rng);
    if (rng() % 2 == 0) copy.places = places.data();
    const size_t first = rng() % 130;
    std::vector<std::byte> to(first + places.size() * copy.to_step, std::byte{0xA5});
    std::vector<std::byte> want = to;
    for (uint32_t i = 0; i < copy.n; ++i) {
      const size_t place = copy.places != nullptr ? places[i] : i;
      for (uint32_t b = 0; b < copy.bytes; ++b) {
        want[first + place * copy.to_step + b] = copy.from[i * copy.step + b];
      }
    }
    copy.to = to.data() + first;
    CopyRows({&copy, 1}, rng() % 2 == 0 ? CopyMode::kStream : CopyMode::kCached);
    ASSERT_EQ(to, want) << copy.bytes << " " << copy.n << " " << copy.to_step;
  }
}

}  // namespace
}  // namespace prefixd
