// Tests the replay of requests against caches: counts by hand, and against a slow model that keeps
// blocks in a list.
#include "measure/capacity/cache_model.h"

#include <algorithm>
#include <cmath>
#include <list>
#include <map>
#include <random>
#include <vector>

#include "measure/capacity/store_model.h"
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
  EXPECT_EQ(all.hit_squares, 200.0 * 200 + 100 * 100 + 299 * 299);
  EXPECT_EQ(ReplayInModel(log, {}).hit_squares, all.hit_squares);
  EXPECT_EQ(all.stored_tokens, 500u);
  EXPECT_EQ(all.distinct_tokens, 500u);
  EXPECT_EQ(all.peak_tokens, 500u);
  // With room for one block nothing but the first block of a prompt is ever there.
  const CacheHits one = ReplayRequests(log, 100, Eviction::kLru);
  EXPECT_EQ(one.peak_tokens, 100u);
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
  const CacheHits score = ReplayRequests(log, 11 * 32768, Eviction::kScore);
  const CacheHits oldest = ReplayRequests(log, 11 * 32768, Eviction::kLru);
  EXPECT_GT(score.hit_tokens, oldest.hit_tokens);
  EXPECT_EQ(score.hit_tokens, 10u * 32768 - 1);
}

// A block that only ends prompts, and is short.
constexpr uint64_t kShortTokens = 30;
bool IsShort(uint64_t id) { return id % 4 == 3; }
uint64_t TokensOf(uint64_t id) { return IsShort(id) ? kShortTokens : 100; }

// Keeps blocks in one list, the last used first; the last leaf of it goes.
uint64_t SlowHits(const RequestLog& log, uint64_t capacity_tokens) {
  std::list<uint64_t> order;
  std::map<uint64_t, uint64_t> parent;
  uint64_t hits = 0;
  const auto stored = [&](uint64_t id) {
    return std::find(order.begin(), order.end(), id) != order.end();
  };
  const auto held = [&] {
    uint64_t sum = 0;
    for (const uint64_t id : order) sum += TokensOf(id);
    return sum;
  };
  for (const Request& r : log.requests) {
    size_t found = 0;
    while (found < r.blocks.size() && stored(r.blocks[found])) ++found;
    hits += std::min<uint64_t>(found * log.block_tokens, r.input_tokens - 1);
    size_t now = found;
    for (bool room = true; now < r.blocks.size(); ++now) {
      const uint64_t needed = TokensOf(r.blocks[now]);
      room = needed <= capacity_tokens;
      while (room && held() + needed > capacity_tokens) {
        auto victim = order.end();
        for (auto it = order.begin(); it != order.end(); ++it) {
          const bool leaf = std::none_of(order.begin(), order.end(), [&](uint64_t other) {
            return parent.contains(other) && parent[other] == *it;
          });
          const bool mine = std::find(r.blocks.begin(), r.blocks.begin() + long(now), *it) !=
                            r.blocks.begin() + long(now);
          if (leaf && !mine) victim = it;
        }
        room = victim != order.end();
        if (!room) break;
        parent.erase(*victim);
        order.erase(victim);
      }
      if (!room) break;
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
    // Prompts are paths in a tree: an id stands for all that went before it. Some end in a short
    // block.
    std::vector<std::vector<uint64_t>> prompts;
    for (int i = 0; i < 60; ++i) {
      std::vector<uint64_t> blocks;
      uint64_t id = 1;
      const size_t n = 1 + rng() % 5;
      for (size_t b = 0; b < n; ++b) blocks.push_back(id = id * 4 + rng() % 3);
      if (rng() % 2 == 0) blocks.push_back(id * 4 + 3);
      prompts.push_back(std::move(blocks));
    }
    RequestLog log = Log(prompts);
    for (Request& r : log.requests) {
      if (IsShort(r.blocks.back())) r.input_tokens -= uint32_t(100 - kShortTokens);
    }
    for (const uint64_t capacity : {20u, 100u, 200u, 330u, 500u, 930u, 2000u}) {
      EXPECT_EQ(ReplayRequests(log, capacity, Eviction::kLru).hit_tokens, SlowHits(log, capacity))
          << "capacity " << capacity;
      for (const Eviction policy : kPolicies) {
        const CacheHits hits = ReplayRequests(log, capacity, policy);
        EXPECT_LE(hits.peak_tokens, capacity) << PolicyName(policy);
        EXPECT_LE(hits.hit_tokens, ReplayRequests(log, 0, policy).hit_tokens) << PolicyName(policy);
      }
    }
  }
}

// A short last block takes the room of its tokens and not a whole block's: all policies hold both
// prompts, as a store of as many tokens does.
TEST(CacheModelTest, AShortBlockTakesItsTokens) {
  RequestLog log = Log({{1, 2}, {3, 4}, {1, 2}, {3, 4}});
  for (Request& r : log.requests) r.input_tokens = 110;
  for (const Eviction policy : kPolicies) {
    EXPECT_EQ(ReplayRequests(log, 220, policy).hit_tokens, 2u * 109) << PolicyName(policy);
  }
  EXPECT_EQ(ReplayInModel(log, {.token_bytes = 1, .quota_bytes = 220}).hit_tokens, 2u * 109);
}

// What is used often stays for LFU; GDSF lets it go once as much else came and went; LRU at once.
TEST(CacheModelTest, CountsOfUsesByHand) {
  const RequestLog log = Log({{1}, {1}, {2}, {3}, {1}, {4}, {5}, {6}, {1}});
  EXPECT_EQ(ReplayRequests(log, 200, Eviction::kLru).requests_hit, 1u);
  EXPECT_EQ(ReplayRequests(log, 200, Eviction::kGdsf).requests_hit, 2u);
  EXPECT_EQ(ReplayRequests(log, 200, Eviction::kLfu).requests_hit, 3u);
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
  EXPECT_EQ(ReplayRequests(log, 400, Eviction::kS3Fifo).requests_hit, 4u);
  EXPECT_EQ(ReplayRequests(log, 400, Eviction::kLru).requests_hit, 3u);
}

// A block that came back from the memory is forgotten there: when it leaves the main queue, it must
// begin in the small one again.
TEST(CacheModelTest, S3FifoForgetsWhatCameBack) {
  std::vector<std::vector<uint64_t>> prompts = {{1}};
  const auto often = [&](uint64_t first, uint64_t last) {
    for (uint64_t id = first; id <= last; ++id) prompts.insert(prompts.end(), 3, {id});
  };
  often(2, 4);             // all of these come into the main queue, ...
  prompts.push_back({5});  // ... 1 leaves the small one and is remembered, ...
  prompts.push_back({1});  // ... comes back, into the main queue, ...
  often(6, 8);
  prompts.push_back({9});  // ... and leaves that one.
  prompts.push_back({1});  // It comes into the small queue, and goes with the next new block.
  prompts.push_back({10});
  prompts.push_back({1});
  EXPECT_EQ(ReplayRequests(Log(prompts), 400, Eviction::kS3Fifo).requests_hit, 12u);
}

TEST(CacheModelTest, ManyUsesOutweighOneThatIsNewer) {
  std::vector<std::vector<uint64_t>> prompts(20, {1});
  prompts.insert(prompts.end(), {{2}, {3}, {4}, {1}});
  const RequestLog log = Log(prompts);
  const auto last = [&](Eviction eviction) {
    return ReplayRequests(log, 200, eviction).requests_hit;
  };
  EXPECT_EQ(last(Eviction::kScore), 20u);
  EXPECT_EQ(last(Eviction::kLru), 19u);
}

}  // namespace
}  // namespace prefixd::bench
