#include "runtime/session/seen_queries.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <vector>

#include "tests/support/random_kv.h"
#include "tests/support/seed.h"

namespace prefixd {
namespace {

// Beside a plain list: what truncations take away does not cost older queries their place.
TEST(SeenQueries, KeepsTheLastOfEachHead) {
  testing::Random random(testing::Seed("SeenQueries"));
  const KvGeometry geometry{2, 4, 2, 3, 3, DType::kF32, {{.scale = 1}, {.scale = 1}}};
  SeenQueries seen(geometry), copy(geometry);
  struct Query {
    uint32_t own;
    std::vector<float> q;
  };
  std::vector<std::deque<Query>> want(geometry.heads().count());
  uint32_t n = 0;
  for (int round = 0; round < 2000; ++round) {
    if (random.Chance(0.1)) {
      n -= std::min(n, random.Int(0, 8));
      seen.Truncate(n);
      for (auto& head : want) std::erase_if(head, [&](const Query& x) { return x.own > n; });
      continue;
    }
    ++n;
    for (size_t head = 0; head < want.size(); ++head) {
      const auto q = random.Normals(2 * 3);
      seen.Note(head, n, q);
      want[head].push_back({n, q});
      if (want[head].size() > kObservedQueries) want[head].pop_front();
    }
    const size_t head = random.Int(0, 3);
    const uint32_t own = n - std::min(n, random.Int(0, 3));
    copy.CopyFrom(seen);
    for (const SeenQueries* of : {&seen, &copy}) {
      const auto got = of->Of(head, own);
      std::vector<Query> expected;
      for (const Query& x : want[head]) {
        if (x.own <= own) expected.push_back(x);
      }
      ASSERT_EQ(got.size(), expected.size()) << round;
      for (size_t i = 0; i < got.size(); ++i) {
        EXPECT_EQ(got[i].own, expected[i].own);
        EXPECT_EQ(got[i].q, expected[i].q);
      }
    }
  }
  EXPECT_GT(SeenQueries::Bytes(geometry), 4u * kObservedQueries * 6 * sizeof(float));
}

}  // namespace
}  // namespace prefixd
