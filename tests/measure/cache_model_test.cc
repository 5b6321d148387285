// Tests the replay of requests against caches: counts by hand, and against a slow model that keeps
// blocks in a list.
#include "measure/capacity/cache_model.h"

#include <algorithm>
#include <cmath>
#include <list>
#include <map>
#include <random>
#include <vector>

#include "tests/support/seed.h"
#include "tests/support/test.h"

namespace prefixd::bench {
namespace {

RequestLog Log(const std::vector<std::vector<uint64_t>>& prompts, double gap = 1) {
  RequestLog log;
  log.block_tokens = 100;
  for (const auto& blocks : prompts) {
    Request r;
    r.seconds = double(log.requests.size()) * gap;
    r.blocks = blocks;
    r.input_tokens = uint32_t(100 * blocks.size());
    log.requests.push_back(std::move(r));
  }
  return log;
}

TEST(CacheModelTest, CountsByHand) {
  const RequestLog log = Log({{1, 2}, {1, 2, 3}, {1, 4}, {5}, {1, 2, 3}});
  const CacheHits all = ReplayRequests(log, 0, Eviction::kLru);
  EXPECT_EQ(all.requests, 5u);
  EXPECT_EQ(all.requests_hit, 3u);
  EXPECT_EQ(all.input_tokens, 1100u);
  // Two blocks; one; and all three but for the last token, which is always computed.
  EXPECT_EQ(all.hit_tokens, 200u + 100u + 299u);
  EXPECT_EQ(all.stored_tokens, 500u);
  EXPECT_EQ(all.distinct_tokens, 500u);
  EXPECT_EQ(all.peak_blocks, 5u);
  // With room for one block nothing but the first block of a prompt is ever there.
  const CacheHits one = ReplayRequests(log, 1, Eviction::kLru);
  EXPECT_EQ(one.peak_blocks, 1u);
  EXPECT_EQ(one.hit_tokens, 100u + 100u);
}

TEST(CacheModelTest, TheLeastScoreGoesAndLongPromptsStayLonger) {
  // A block far into a prompt costs more to compute than one at its beginning; used alike, the
  // other one goes.
  std::vector<uint64_t> deep;
  for (uint64_t i = 0; i < 10; ++i) deep.push_back(100 + i);
  RequestLog log = Log({deep, {1}, {2}});
  log.block_tokens = 32768;
  for (Request& r : log.requests) r.input_tokens = uint32_t(32768 * r.blocks.size());
  log.requests.push_back(log.requests.front());
  for (size_t i = 0; i < 4; ++i) log.requests[i].seconds = double(i);
  const CacheHits score = ReplayRequests(log, 11, Eviction::kScore);
  const CacheHits oldest = ReplayRequests(log, 11, Eviction::kLru);
  EXPECT_GT(score.hit_tokens, oldest.hit_tokens);
  EXPECT_EQ(score.hit_tokens, 10u * 32768 - 1);
}

// Keeps blocks in one list, the last used first; the last leaf of it goes.
uint64_t SlowHits(const RequestLog& log, size_t capacity) {
  std::list<uint64_t> order;
  std::map<uint64_t, uint64_t> parent;
  uint64_t hits = 0;
  const auto stored = [&](uint64_t id) {
    return std::find(order.begin(), order.end(), id) != order.end();
  };
  for (const Request& r : log.requests) {
    size_t found = 0;
    while (found < r.blocks.size() && stored(r.blocks[found])) ++found;
    hits += std::min<uint64_t>(found * log.block_tokens, r.input_tokens - 1);
    size_t now = found;
    for (; now < r.blocks.size(); ++now) {
      if (order.size() >= capacity) {
        auto victim = order.end();
        for (auto it = order.begin(); it != order.end(); ++it) {
          const bool leaf = std::none_of(order.begin(), order.end(), [&](uint64_t other) {
            return parent.contains(other) && parent[other] == *it;
          });
          const bool mine = std::find(r.blocks.begin(), r.blocks.begin() + long(now), *it) !=
                            r.blocks.begin() + long(now);
          if (leaf && !mine) victim = it;
        }
        if (victim == order.end()) break;
        parent.erase(*victim);
        order.erase(victim);
      }
      order.push_front(r.blocks[now]);
      if (now > 0) parent[r.blocks[now]] = r.blocks[now - 1];
    }
    for (size_t i = now; i-- > 0;) {
      order.remove(r.blocks[i]);
      order.push_front(r.blocks[i]);
    }
  }
  return hits;
}

TEST(CacheModelTest, IsTheSlowModel) {
  std::mt19937_64 rng(testing::Seed("CacheModelTest.IsTheSlowModel"));
  for (int round = 0; round < 60; ++round) {
    // Prompts are paths in a tree: an id stands for all that went before it.
    std::vector<std::vector<uint64_t>> prompts;
    for (int i = 0; i < 60; ++i) {
      std::vector<uint64_t> blocks;
      uint64_t id = 1;
      const size_t n = 1 + rng() % 5;
      for (size_t b = 0; b < n; ++b) blocks.push_back(id = id * 4 + rng() % 3);
      prompts.push_back(std::move(blocks));
    }
    const RequestLog log = Log(prompts);
    for (const size_t capacity : {1, 2, 3, 5, 9, 20}) {
      EXPECT_EQ(ReplayRequests(log, capacity, Eviction::kLru).hit_tokens, SlowHits(log, capacity))
          << "capacity " << capacity;
      for (const Eviction policy : kPolicies) {
        const CacheHits hits = ReplayRequests(log, capacity, policy);
        EXPECT_LE(hits.peak_blocks, capacity) << PolicyName(policy);
        EXPECT_LE(hits.hit_tokens, ReplayRequests(log, 0, policy).hit_tokens) << PolicyName(policy);
      }
    }
  }
}

// What is used often stays for LFU; GDSF lets it go once as much else came and went; LRU at once.
TEST(CacheModelTest, CountsOfUsesByHand) {
  const RequestLog log = Log({{1}, {1}, {2}, {3}, {1}, {4}, {5}, {6}, {1}});
  EXPECT_EQ(ReplayRequests(log, 2, Eviction::kLru).requests_hit, 1u);
  EXPECT_EQ(ReplayRequests(log, 2, Eviction::kGdsf).requests_hit, 2u);
  EXPECT_EQ(ReplayRequests(log, 2, Eviction::kLfu).requests_hit, 3u);
}

// Blocks that are used once pass through S3-FIFO's small queue, beside one that was used again; and
// one that comes back soon after it left is kept like that.
TEST(CacheModelTest, S3FifoKeepsWhatIsUsedAgain) {
  std::vector<std::vector<uint64_t>> prompts = {{1}, {1}, {1}, {2}};
  for (uint64_t id = 3; id < 6; ++id) prompts.push_back({id});
  prompts.push_back({2});  // remembered
  for (uint64_t id = 10; id < 30; ++id) prompts.push_back({id});
  prompts.push_back({1});
  prompts.push_back({2});
  const RequestLog log = Log(prompts);
  EXPECT_EQ(ReplayRequests(log, 4, Eviction::kS3Fifo).requests_hit, 4u);
  EXPECT_EQ(ReplayRequests(log, 4, Eviction::kLru).requests_hit, 3u);
}

TEST(CacheModelTest, ManyUsesOutweighOneThatIsNewer) {
  std::vector<std::vector<uint64_t>> prompts(20, {1});
  prompts.insert(prompts.end(), {{2}, {3}, {4}, {1}});
  const RequestLog log = Log(prompts);
  const auto last = [&](Eviction eviction) {
    return ReplayRequests(log, 2, eviction).requests_hit;
  };
  EXPECT_EQ(last(Eviction::kScore), 20u);
  EXPECT_EQ(last(Eviction::kLru), 19u);
}

}  // namespace
}  // namespace prefixd::bench
