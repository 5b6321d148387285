#include "index/code_search/row_order.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <set>

#include "tests/index/index_test_support.h"
#include "tests/support/seed.h"

namespace prefixd::index {
namespace {

RowsView View(const std::vector<float>& keys, uint32_t dim) {
  return {reinterpret_cast<const std::byte*>(keys.data()), keys.size() / dim, dim * sizeof(float),
          RowShape{dim, 0, DType::kF32}};
}

void ExpectPermutation(std::vector<uint32_t> order, size_t n) {
  std::sort(order.begin(), order.end());
  std::vector<uint32_t> all(n);
  std::iota(all.begin(), all.end(), 0);
  EXPECT_EQ(order, all);
}

TEST(RowOrder, IsAPermutationAndTheSameEveryTime) {
  Random random(prefixd::testing::Seed("IsAPermutationAndTheSameEveryTime"));
  for (int round = 0; round < 60; ++round) {
    const uint32_t n = Uniform(random, 0, 700), dim = Uniform(random, 1, 80);
    const std::vector<float> keys = Normal(random, size_t{n} * dim, 2);
    const uint32_t rows_per_page = Uniform(random, 1, 40);
    const std::vector<uint32_t> order = ClusterOrder(View(keys, dim), rows_per_page);
    ExpectPermutation(order, n);
    EXPECT_EQ(ClusterOrder(View(keys, dim), rows_per_page), order);
  }
}

TEST(RowOrder, LessThanAPageStaysAsItIs) {
  Random random(prefixd::testing::Seed("LessThanAPageStaysAsItIs"));
  for (const uint32_t n : {0u, 1u, 2u, 15u, 16u}) {
    const std::vector<uint32_t> order = ClusterOrder(View(Normal(random, n * 8), 8), 16);
    ExpectPermutation(order, n);
    EXPECT_TRUE(std::is_sorted(order.begin(), order.end()));
  }
}

// Clusters that arrive interleaved each get whole pages of their own.
TEST(RowOrder, EqualClustersShareNoPage) {
  Random random(prefixd::testing::Seed("EqualClustersShareNoPage"));
  constexpr uint32_t kWidth = 24, kClusters = 8, kPage = 16;
  const std::vector<float> centres = Normal(random, kClusters * kWidth, 10);
  std::vector<float> keys;
  for (uint32_t i = 0; i < kClusters * kPage; ++i) {
    for (uint32_t d = 0; d < kWidth; ++d) {
      keys.push_back(centres[i % kClusters * kWidth + d] + Normal(random, 1, 0.01f)[0]);
    }
  }
  const std::vector<uint32_t> order = ClusterOrder(View(keys, kWidth), kPage);
  for (uint32_t page = 0; page < kClusters; ++page) {
    std::set<uint32_t> clusters;
    for (uint32_t i = 0; i < kPage; ++i) clusters.insert(order[page * kPage + i] % kClusters);
    EXPECT_EQ(clusters.size(), size_t{1}) << "page " << page;
  }
}

TEST(RowOrder, EqualKeysKeepTheirOrderOfArrival) {
  const std::vector<float> keys(300 * 12, 1.5f);
  const std::vector<uint32_t> order = ClusterOrder(View(keys, 12), 32);
  EXPECT_TRUE(std::is_sorted(order.begin(), order.end()));
}

TEST(RowOrder, NonFiniteKeysAreOrderedToo) {
  Random random(prefixd::testing::Seed("NonFiniteKeysAreOrderedToo"));
  std::vector<float> keys = Normal(random, 200 * 10);
  keys[17] = std::numeric_limits<float>::quiet_NaN();
  keys[500] = std::numeric_limits<float>::infinity();
  keys[900] = std::numeric_limits<float>::max();
  keys[901] = -std::numeric_limits<float>::max();
  ExpectPermutation(ClusterOrder(View(keys, 10), 4), 200);
}

}  // namespace
}  // namespace prefixd::index
