// Tests what the daemon keeps for its operator: times of calls, sessions, what prefixes saved.
#include "daemon/watch/watch.h"

#include <cmath>
#include <nlohmann/json.hpp>
#include <random>
#include <thread>
#include <vector>

#include "daemon/watch/status.h"
#include "tests/daemon/connections/stepping_store.h"
#include "tests/support/expect_ok.h"
#include "tests/support/seed.h"
#include "tests/support/test.h"

namespace prefixd::daemon {
namespace {

using prefixd::testing::SteppingStore;

TEST(Latencies, EveryTimeLiesInTheBucketThatItsBoundsSay) {
  std::mt19937_64 rng(prefixd::testing::Seed("Latencies"));
  for (int i = 0; i < 100000; ++i) {
    const uint64_t us = rng() >> (rng() % 64);
    const size_t bucket = LatencyCounts::BucketOf(us);
    ASSERT_LT(bucket, LatencyCounts::kBuckets);
    if (bucket + 1 < LatencyCounts::kBuckets) {
      EXPECT_LT(us, LatencyCounts::EndOf(bucket)) << us;
    }
    if (bucket > 0) {
      EXPECT_GE(us, LatencyCounts::EndOf(bucket - 1)) << us;
    }
  }
  for (size_t b = 1; b < LatencyCounts::kBuckets; ++b) {
    EXPECT_GT(LatencyCounts::EndOf(b), LatencyCounts::EndOf(b - 1));
  }
}

TEST(Latencies, QuantilesAreThoseOfTheTimesWithinABucketsWidth) {
  std::mt19937_64 rng(prefixd::testing::Seed("Quantiles"));
  std::lognormal_distribution<double> times(6, 1.5);  // microseconds
  Latencies latencies;
  std::vector<double> all;
  for (int i = 0; i < 20000; ++i) {
    const double us = times(rng);
    all.push_back(us * 1e-6);
    latencies.Add(std::chrono::nanoseconds(int64_t(us * 1000)));
  }
  std::ranges::sort(all);
  const LatencyCounts counts = latencies.counts();
  EXPECT_EQ(counts.count(), all.size());
  for (const double share : {0.01, 0.5, 0.9, 0.99}) {
    const double exact = all[size_t(share * double(all.size() - 1))];
    EXPECT_NEAR(counts.QuantileSeconds(share), exact, 0.26 * exact + 2e-6) << share;
  }
  EXPECT_EQ(LatencyCounts().QuantileSeconds(0.5), 0);
  EXPECT_EQ((counts - counts).count(), 0u);
}

TEST(Latencies, ThreadsLoseNothing) {
  Latencies latencies;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 10000; ++i) latencies.Add(std::chrono::microseconds(i));
    });
  }
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(latencies.counts().count(), 40000u);
}

class WatchTest : public ::testing::Test {
 protected:
  std::shared_ptr<Session> Attach(const std::string& tenant) {
    AttachSpec spec;
    spec.model = "m";
    spec.tenant = tenant;
    auto session = store_.Attach(spec);
    EXPECT_OK(session);
    return *session;
  }
  SteppingStore store_{std::make_shared<SteppingStore::Control>()};
  Watch watch_;
};

TEST_F(WatchTest, KeepsWhatSessionsReadWhenTheyHaveGone) {
  const auto a = Attach("a"), b = Attach("b");
  const uint64_t of_a = watch_.Attached(a), of_b = watch_.Attached(b);
  EXPECT_EQ(watch_.Take(std::nullopt).sessions.size(), 2u);
  Ledger read;
  read.steps = 3;
  watch_.Detached(of_a, read);
  watch_.Detached(of_a, read);  // once
  watch_.Detached(of_b, read);
  const Watch::Report report = watch_.Take(std::nullopt);
  EXPECT_TRUE(report.sessions.empty());
  EXPECT_EQ(report.ledger.steps, 6u);
  EXPECT_EQ(report.saved_by_all.attaches, 2u);
}

TEST_F(WatchTest, TimeIsSavedWhereThePaceIsKnown) {
  watch_.Attached(Attach("a"));
  EXPECT_EQ(watch_.Take(std::nullopt).saved_by_all.timed_tokens, 0u);
  watch_.Stored("m", 100, std::chrono::seconds(50));
  watch_.Attached(Attach("a"));  // one token, by this store
  const Watch::Report report = watch_.Take(std::nullopt);
  EXPECT_EQ(report.saved_by_all.tokens, 2u);
  EXPECT_EQ(report.saved_by_all.timed_tokens, 1u);
  EXPECT_DOUBLE_EQ(report.saved_by_all.seconds, 0.5);
}

TEST_F(WatchTest, AForkIsListedAndSavesNothing) {
  const auto attached = Attach("a"), forked = Attach("a");
  watch_.Attached(attached);
  const uint64_t fork = watch_.Forked(forked);
  EXPECT_EQ(watch_.Take(std::nullopt).sessions.size(), 2u);
  Ledger read;
  read.steps = 3;
  watch_.Detached(fork, read);
  const Watch::Report report = watch_.Take(std::nullopt);
  EXPECT_EQ(report.sessions.size(), 1u);
  EXPECT_EQ(report.ledger.steps, 3u);
  EXPECT_EQ(report.saved_by_all.attaches, 1u);
  EXPECT_EQ(report.saved_by_all.tokens, 1u);
}

TEST_F(WatchTest, ShowsATenantItsOwn) {
  watch_.Attached(Attach("a"));
  watch_.Attached(Attach("b"));
  watch_.Failed("b", "attach", "c1-1", {Code::kNotFound, "no such prompt of b"});
  const Watch::Report report = watch_.Take("a");
  EXPECT_EQ(report.failures.size(), 0u);
  const wire::Json json = WatchJson(watch_, {Viewer::Sees::kTotals, ""});
  EXPECT_FALSE(json.contains("sessions"));
  EXPECT_EQ(json.dump().find("no such prompt"), std::string::npos);
  EXPECT_EQ(json["failed"]["not_found"], 1);
  EXPECT_EQ(WatchJson(watch_, {Viewer::Sees::kAll, ""})["failures"][0]["request"], "c1-1");
}

TEST_F(WatchTest, ListsHaveBounds) {
  for (int i = 0; i < 1000; ++i) {
    watch_.Failed("t", "step", std::to_string(i), {Code::kInternal, std::string(100000, 'x')});
  }
  Watch::Report report = watch_.Take(std::nullopt);
  EXPECT_LE(report.failures.size(), Watch::kMostFailures);
  EXPECT_LT(report.failures.front().message.size(), 1000u);
  EXPECT_EQ(report.failed[static_cast<size_t>(Code::kInternal)], 1000u);
  for (size_t i = 0; i < Watch::kMostModels + 10; ++i) {
    watch_.Stored("model" + std::to_string(i), 1, std::chrono::seconds(1));
  }
  for (size_t i = 0; i < Watch::kMostPoints + 10; ++i) watch_.AddPoint(int64_t(i));
  report = watch_.Take(std::nullopt);
  EXPECT_EQ(report.points.size(), Watch::kMostPoints);
  EXPECT_EQ(report.points.back().unix_ms, int64_t(Watch::kMostPoints + 9));
}

TEST_F(WatchTest, OneTenantsFailuresPushOutNobodyElses) {
  const auto fail = [&](const std::string& tenant, const std::string& request) {
    watch_.Failed(tenant, "step", request, {Code::kInternal, "x"});
  };
  const auto kept = [&](const std::string& tenant) {
    std::vector<std::string> requests;
    for (const auto& failure : watch_.Take(tenant).failures) requests.push_back(failure.request);
    return requests;
  };
  for (int i = 0; i < 500; ++i) {  // more in a second than are kept of one
    fail("loud", std::to_string(i));
    if (i == 250) fail("quiet", "first");
  }
  fail("quiet", "second");
  EXPECT_EQ(kept("quiet"), (std::vector<std::string>{"second", "first"}));
  const std::vector<std::string> loud = kept("loud");
  EXPECT_GE(loud.size(), 10u);
  EXPECT_LT(loud.size(), 100u);
  // Where the list is full, who has most loses the oldest.
  for (int t = 0; t < 20; ++t) {
    for (int i = 0; i < 10; ++i) fail("t" + std::to_string(t), std::to_string(i));
  }
  EXPECT_EQ(watch_.Take(std::nullopt).failures.size(), Watch::kMostFailures);
  EXPECT_EQ(kept("quiet"), (std::vector<std::string>{"second", "first"}));
  EXPECT_EQ(kept("t19").front(), "9");
  EXPECT_LE(kept("t0").size(), 4u);
}

TEST_F(WatchTest, PointsTellOfTheirTimeAlone) {
  watch_.AddPoint(1);
  for (int i = 0; i < 100; ++i) watch_.Took(Timed::kStep, std::chrono::milliseconds(1));
  watch_.AddPoint(2);
  for (int i = 0; i < 10; ++i) watch_.Took(Timed::kStep, std::chrono::milliseconds(100));
  watch_.AddPoint(3);
  const Watch::Report report = watch_.Take(std::nullopt);
  ASSERT_EQ(report.points.size(), 2u);
  EXPECT_EQ(report.points[0].calls, 100u);
  EXPECT_NEAR(report.points[0].p99_seconds, 1e-3, 0.3e-3);
  EXPECT_EQ(report.points[1].calls, 10u);
  EXPECT_NEAR(report.points[1].p50_seconds, 0.1, 0.03);
  EXPECT_EQ(report.recent.count(), 110u);
}

}  // namespace
}  // namespace prefixd::daemon
