#include <thread>

#include "tests/index/index_test_support.h"
#include "tests/support/seed.h"

namespace prefixd::index {
namespace {

TEST(ConcurrentSearch, ThreadsSeeWhatOneThreadSees) {
  Random random(prefixd::testing::Seed("ThreadsSeeWhatOneThreadSees"));
  const uint32_t n = 1500, dim = 32, group = 2;
  const AttentionLike data(random, n, dim);
  const TestRows rows(data.keys, dim, DType::kBf16);
  auto built = BuildIvfIndex(rows.view(), {0, n}, {});
  ASSERT_TRUE(built.ok());
  const std::unique_ptr<KeyIndex> ivf = std::move(built).value(), exact = MakeExactIndex({0, n});

  std::vector<std::vector<float>> queries;
  std::vector<SearchRequest> requests;
  for (int i = 0; i < 24; ++i) queries.push_back(data.Queries(random, group));
  for (int i = 0; i < 24; ++i) {
    SearchRequest request;
    request.queries = queries[i];
    request.group = group;
    request.layer = Layer(dim);
    request.candidates = {static_cast<uint32_t>(i), n};
    request.k = 20 + i;
    request.keys = rows.view();
    requests.push_back(request);
  }
  for (const KeyIndex* index : {ivf.get(), exact.get()}) {
    std::vector<Selection> alone;
    for (const SearchRequest& request : requests) {
      auto selection = index->Search(request);
      ASSERT_TRUE(selection.ok());
      alone.push_back(std::move(selection).value());
    }
    // Each thread counts for itself; assertions belong to this one.
    std::vector<int> different(4, 0);
    std::vector<std::thread> threads;
    for (size_t t = 0; t < different.size(); ++t) {
      threads.emplace_back([&, t] {
        for (size_t i = 0; i < requests.size(); ++i) {
          const size_t r = (i + 7 * t) % requests.size();
          const auto selection = index->Search(requests[r]);
          different[t] += !selection.ok() || selection->ids != alone[r].ids ||
                          selection->cuts[0].score != alone[r].cuts[0].score;
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (const int count : different) EXPECT_EQ(count, 0);
  }
}

}  // namespace
}  // namespace prefixd::index
