#include "runtime/step/retained_tokens.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>
#include <numeric>
#include <set>
#include <vector>

#include "tests/support/random_kv.h"
#include "tests/support/seed.h"

namespace prefixd {
namespace {

TEST(RetainedTokens, JoinAndLeaveOutAreSetOperations) {
  testing::Random random(testing::Seed("RetainedTokens"));
  const RowShape row{2, 1, DType::kF32};
  for (int round = 0; round < 500; ++round) {
    const auto some = [&](size_t most) {
      return testing::RandomSubset(random, 10, 40, random.Int(0, uint32_t(most)));
    };
    RetainedTokens all;
    RetainedHead& head = all.heads.emplace_back();
    head.tokens = some(20);
    head.rows.resize(head.tokens.size() * row.bytes());
    const TokenRange mid{random.Int(5, 25), random.Int(25, 45)};
    const TokenRange in = all.In(0, mid);
    std::vector<uint32_t> inside;
    std::ranges::copy_if(head.tokens, std::back_inserter(inside),
                         [&](uint32_t t) { return mid.contains(t); });
    const auto begin = head.tokens.begin();
    ASSERT_EQ(std::vector(begin + in.begin, begin + in.end), inside);
    EXPECT_EQ(all.Most(mid), inside.size());

    // A key says whose it is.
    std::vector<uint32_t> ids = some(30);
    const bool with_keys = random.Chance(0.5);
    std::vector<std::byte> keys;
    for (size_t i = 0; with_keys && i < ids.size(); ++i) {
      keys.insert(keys.end(), row.key_bytes(), std::byte(ids[i]));
    }
    std::vector<uint32_t> left;
    std::ranges::set_difference(ids, inside, std::back_inserter(left));
    auto plain = ids;
    LeaveOut(inside, plain);
    EXPECT_EQ(plain, left);
    LeaveOut(inside, row.key_bytes(), ids, keys);
    ASSERT_EQ(ids, left);
    ASSERT_EQ(keys.size(), with_keys ? ids.size() * row.key_bytes() : 0);
    for (size_t i = 0; with_keys && i < ids.size(); ++i) {
      EXPECT_EQ(keys[i * row.key_bytes()], std::byte(ids[i]));
    }

    std::vector<std::byte> read(ids.size() * row.bytes());
    const RowsView view{read.data(), ids.size(), row.bytes(), row};
    std::vector<RowRef> rows;
    JoinRetained(head, in, row, view, ids, rows);
    std::vector<uint32_t> both;
    std::ranges::merge(left, inside, std::back_inserter(both));
    ASSERT_EQ(ids, both);
    ASSERT_EQ(rows.size(), both.size());
    for (size_t i = 0; i < both.size(); ++i) {
      const auto r = std::ranges::find(head.tokens, both[i]);
      const auto l = std::ranges::find(left, both[i]);
      const bool retained = std::ranges::binary_search(inside, both[i]);
      const std::byte* want = retained ? &head.rows[size_t(r - begin) * row.bytes()]
                                       : &read[size_t(l - left.begin()) * row.bytes()];
      EXPECT_EQ(rows[i].key, want);
      EXPECT_EQ(rows[i].value, want + row.key_bytes());
    }
  }
}

}  // namespace
}  // namespace prefixd
