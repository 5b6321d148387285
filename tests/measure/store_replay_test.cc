// Holds a real store to its model on a small log: the same tokens hit, the same stored, within what
// pages and the store's own work change.
#include "measure/capacity/store_replay.h"

#include "measure/capacity/chat_log.h"
#include "tests/support/files.h"
#include "tests/support/test.h"

namespace prefixd::bench {
namespace {

RequestLog SmallLog() {
  ChatSpec spec;
  spec.hours = 0.5;
  spec.requests_per_hour = 300;
  spec.median_tokens = 2000;
  return ChatRequests(spec, 512);
}

class StoreReplayTest : public ::testing::Test {
 protected:
  Result<ReplayOutcome> Replay(const RequestLog& log, uint64_t quota) {
    ReplayOptions options;
    options.dir = dir_ / "store";
    options.quota_bytes = quota;
    return ReplayInStore(log, options);
  }
  testing::TempDir dir_;
};

TEST_F(StoreReplayTest, WithoutAQuotaTheyAreEqual) {
  const RequestLog log = SmallLog();
  const auto store = Replay(log, 0);
  ASSERT_TRUE(store.ok()) << store.error().message;
  const CacheHits model = ReplayInModel(log, {});
  EXPECT_GT(model.hit_tokens, 0u);
  EXPECT_EQ(store->hits.hit_tokens, model.hit_tokens);
  EXPECT_EQ(store->hits.hit_squares, model.hit_squares);
  EXPECT_EQ(store->hits.requests_hit, model.requests_hit);
  EXPECT_EQ(store->hits.stored_tokens, model.stored_tokens);
  EXPECT_EQ(store->hits.distinct_tokens, model.distinct_tokens);
  EXPECT_EQ(store->evictions, 0u);
  EXPECT_GE(store->disk_bytes, store->row_bytes);
  // And both hit what a cache of blocks does.
  EXPECT_EQ(model.hit_tokens, ReplayRequests(log, 0, Eviction::kLru).hit_tokens);
}

TEST_F(StoreReplayTest, WithAQuotaTheStoreDoesWhatTheModelSays) {
  const RequestLog log = SmallLog();
  auto shape = MeasureStoreShape(dir_ / "probe");
  ASSERT_TRUE(shape.ok()) << shape.error().message;
  EXPECT_GT(shape->token_bytes, kReplayRowBytes);
  EXPECT_LT(shape->token_bytes, 1.3 * kReplayRowBytes);
  const CacheHits all = ReplayInModel(log, {});
  shape->quota_bytes =
      static_cast<uint64_t>(0.2 * (shape->token_bytes * double(all.stored_tokens) +
                                   shape->segment_bytes * double(log.requests.size())));
  const CacheHits model = ReplayInModel(log, *shape);
  const auto store = Replay(log, shape->quota_bytes);
  ASSERT_TRUE(store.ok()) << store.error().message;
  EXPECT_GT(store->evictions, 20u);
  EXPECT_EQ(store->refused, 0u);
  EXPECT_LE(store->stored_bytes, shape->quota_bytes);
  EXPECT_LT(model.hit_tokens, all.hit_tokens);
  EXPECT_NEAR(double(store->hits.hit_tokens), double(model.hit_tokens),
              0.03 * double(model.hit_tokens));
  EXPECT_NEAR(double(store->hits.stored_tokens), double(model.stored_tokens),
              0.03 * double(model.stored_tokens));
}

// By the log's time and not by the clock: what is idle for long goes, though all was put at once.
TEST_F(StoreReplayTest, UsesGrowOldByTheLog) {
  RequestLog log;
  log.block_tokens = 512;
  const auto ask = [&](double seconds, uint64_t id) {
    log.requests.push_back(
        {seconds, 4000, 1, {id, id + 1, id + 2, id + 3, id + 4, id + 5, id + 6, id + 7}});
  };
  // The first is used often and then for hours no more; the second once, just before room is
  // needed.
  for (int i = 0; i < 8; ++i) ask(i, 100);
  ask(20'000, 200);
  ask(20'001, 300);
  ask(20'002, 200);
  ask(20'003, 100);
  auto shape = MeasureStoreShape(dir_ / "probe");
  ASSERT_TRUE(shape.ok()) << shape.error().message;
  const double one = shape->segment_bytes + 4000 * shape->token_bytes;
  const auto store = Replay(log, static_cast<uint64_t>(2.5 * one));
  ASSERT_TRUE(store.ok()) << store.error().message;
  // Seven hits of the first, one of the second; then the first is gone.
  EXPECT_EQ(store->hits.requests_hit, 8u);
  shape->quota_bytes = static_cast<uint64_t>(2.5 * one);
  EXPECT_EQ(ReplayInModel(log, *shape).requests_hit, 8u);
}

}  // namespace
}  // namespace prefixd::bench
