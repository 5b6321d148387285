// Tests the bounds of what connections take: places, descriptors, slots, lines of the log.
#include "daemon/limits/connection_limits.h"

#include "base/descriptor_limit.h"
#include "daemon/limits/descriptors.h"
#include "daemon/limits/region_memory.h"
#include "daemon/limits/slots.h"
#include "daemon/process/log_throttle.h"
#include "tests/support/expect_ok.h"
#include "tests/support/test.h"

namespace prefixd::daemon {
namespace {

using Clock = ConnectionLimits::Clock;

Config Small() {
  Config config;
  config.tcp = "127.0.0.1:0";
  config.max_connections = 8;
  config.max_silent_connections = 2;
  return config;
}

TEST(ConnectionLimits, TcpPeersLeaveLocalClientsTheirPlace) {
  ConnectionLimits limits(Small());
  const auto now = Clock::now();
  for (uint64_t id = 1; id <= 6; ++id) {
    ASSERT_OK(limits.Arrive(id, /*local=*/false, now).admitted);
    ASSERT_OK(limits.Greet(id, "tenant-" + std::to_string(id % 2), false));
  }
  const auto refused = limits.Arrive(7, false, now);
  EXPECT_FALSE(refused.close);
  EXPECT_CODE(refused.admitted, Code::kResourceExhausted);
  EXPECT_NE(refused.admitted.error().message.find("limits.max_tcp_connections = 6"),
            std::string::npos);
  EXPECT_EQ(limits.tcp(), 6u);
  ASSERT_OK(limits.Arrive(8, /*local=*/true, now).admitted);
  ASSERT_OK(limits.Arrive(9, true, now).admitted);
  limits.Leave(3);
  ASSERT_OK(limits.Arrive(10, false, now).admitted);
  ASSERT_OK(limits.Arrive(11, true, now).admitted);  // in the place of one that said nothing
}

TEST(ConnectionLimits, TheLongestSilentOneMakesRoom) {
  ConnectionLimits limits(Small());
  const auto begin = Clock::now();
  const auto later = begin + std::chrono::seconds(2);
  for (uint64_t id = 1; id <= 4; ++id) {  // at one time, as after a restart: nobody is closed
    const auto arrival = limits.Arrive(id, false, begin);
    ASSERT_OK(arrival.admitted);
    EXPECT_FALSE(arrival.close);
  }
  ASSERT_OK(limits.Greet(1, "", false));
  EXPECT_EQ(limits.Arrive(5, false, later).close, 2u);
  EXPECT_EQ(limits.Arrive(6, false, later).close, 3u);
  EXPECT_EQ(limits.Arrive(7, false, later).close, 4u);
  EXPECT_EQ(limits.Arrive(8, false, later).close, std::nullopt);  // the others are new
  EXPECT_CODE(limits.Greet(2, "", false), Code::kUnavailable);
  // Where all places are taken even a new one goes, and one that said hello never does.
  for (uint64_t id = 9; id < 200; ++id) {
    const auto arrival = limits.Arrive(id, false, later);
    ASSERT_OK(arrival.admitted);
    ASSERT_NE(arrival.close, 1u);
  }
  EXPECT_EQ(limits.tcp(), 6u);
  ASSERT_OK(limits.Arrive(200, true, later).admitted);
}

TEST(ConnectionLimits, OneTenantLeavesOthersTheirPlace) {
  ConnectionLimits limits(Small());
  for (uint64_t id = 1; id <= 6; ++id) {
    ASSERT_OK(limits.Arrive(id, true).admitted);
    ASSERT_OK(limits.Greet(id, "greedy", false));
  }
  ASSERT_OK(limits.Arrive(7, true).admitted);
  EXPECT_CODE(limits.Greet(7, "greedy", false), Code::kResourceExhausted);
  ASSERT_OK(limits.Greet(7, "other", false));
  ASSERT_OK(limits.Arrive(8, true).admitted);
  ASSERT_OK(limits.Greet(8, "greedy", /*admin=*/true));  // who looks after the daemon gets in
  limits.Leave(1);
  limits.Leave(1);  // gone already
  ASSERT_OK(limits.Arrive(9, true).admitted);
  ASSERT_OK(limits.Greet(9, "greedy", false));
}

TEST(Descriptors, AcceptingNeverRunsOutOfThem) {
  Config config;
  config.max_connections = 256;
  const auto ample = DivideDescriptors(config, 65536);
  ASSERT_OK(ample);
  EXPECT_EQ(ample->connections, 256u);
  EXPECT_EQ(ample->puts, 256u * config.max_puts);
  EXPECT_EQ(ample->warning, "");
  for (uint64_t limit = 325; limit < 2000; limit += 13) {
    const auto d = DivideDescriptors(config, limit);
    ASSERT_OK(d);
    EXPECT_LE(2 * d->connections + d->puts + DescriptorsForSegments(limit), limit - 128);
    EXPECT_GE(d->connections, 16u);
    EXPECT_GE(d->puts, 16u);
    EXPECT_EQ(d->warning.empty(), d->connections == 256);
  }
  const auto few = DivideDescriptors(config, 200);
  EXPECT_CODE(few, Code::kFailedPrecondition);
  EXPECT_NE(few.error().message.find("ulimit -n"), std::string::npos);
}

// What was chosen for the larger total would leave nobody else a place.
TEST(Descriptors, FewerConnectionsKeepTheirParts) {
  const auto lowered = [](uint64_t tcp, uint64_t tenant, uint64_t descriptors) {
    Config config;
    config.max_connections = 256;
    config.max_tcp_connections = tcp;
    config.max_tenant_connections = tenant;
    const auto shares = DivideDescriptors(config, descriptors);
    EXPECT_OK(shares);
    LowerConnections(*shares, &config);
    EXPECT_EQ(config.max_connections, shares->connections);
    return config;
  };
  const Config ample = lowered(250, 256, 65536);
  EXPECT_EQ(MostTcpConnections(ample), 250u);
  EXPECT_EQ(MostTenantConnections(ample), 256u);
  const Config few = lowered(200, 250, 350);
  ASSERT_LT(few.max_connections, 200u);
  const uint64_t part = few.max_connections - few.max_connections / 4;
  EXPECT_EQ(MostTcpConnections(few), part);
  EXPECT_EQ(MostTenantConnections(few), part);
  EXPECT_EQ(MostTcpConnections(lowered(0, 0, 350)), part);
  EXPECT_EQ(MostTcpConnections(lowered(3, 2, 350)), 3u);
  EXPECT_EQ(MostTenantConnections(lowered(3, 2, 350)), 2u);
}

TEST(RegionMemoryTest, OneTenantLeavesOthersRoom) {
  const auto budget = MemoryBudget::Create({.capacity = 64 << 20});
  RegionMemory regions(budget);
  constexpr uint64_t kMiB = 1 << 20;
  RegionMemory::Taken a, b, c, d;
  EXPECT_FALSE(regions.TryTake("greedy", 13 * kMiB, &a));  // three quarters of a quarter are 12
  EXPECT_TRUE(regions.TryTake("greedy", 8 * kMiB, &a));
  EXPECT_FALSE(regions.TryTake("greedy", 8 * kMiB, &b));
  EXPECT_TRUE(regions.TryTake("greedy", 4 * kMiB, &b));
  EXPECT_FALSE(regions.TryTake("greedy", 1, &c));
  EXPECT_TRUE(regions.TryTake("other", 4 * kMiB, &c));
  EXPECT_FALSE(regions.TryTake("third", 1, &d));  // the whole quarter is taken
  EXPECT_EQ(budget->used(MemoryKind::kRegions), 16 * kMiB);
  b = {};
  EXPECT_TRUE(regions.TryTake("greedy", 3 * kMiB, &d));
  a.Release(), c.Release(), d.Release();
  EXPECT_EQ(budget->used(MemoryKind::kRegions), 0u);
  EXPECT_TRUE(regions.TryTake("greedy", 12 * kMiB, &a));
  RegionMemory unbounded(nullptr);
  EXPECT_TRUE(unbounded.TryTake("any", 1ull << 40, &b));
}

TEST(SlotsTest, OneTenantNeverTakesTheLastQuarter) {
  Slots slots(8, "sessions", "limits.max_sessions");
  std::vector<Slots::Slot> held;
  for (int i = 0; i < 6; ++i) {
    auto slot = slots.Take("greedy");
    ASSERT_OK(slot);
    held.push_back(*std::move(slot));
  }
  EXPECT_CODE(slots.Take("greedy"), Code::kResourceExhausted);
  for (const char* other : {"a", "b"}) {
    auto slot = slots.Take(other);
    ASSERT_OK(slot);
    held.push_back(*std::move(slot));
  }
  EXPECT_CODE(slots.Take("c"), Code::kResourceExhausted);
  held.erase(held.begin());
  ASSERT_OK(slots.Take("greedy"));
  held.clear();
  // Where the store bounds all, it says so itself.
  Slots part(2, "sessions", "limits.max_sessions", Slots::Bounds::kPart);
  for (int i = 0; i < 3; ++i) {
    auto slot = part.Take("alone");
    ASSERT_OK(slot);
    held.push_back(*std::move(slot));
  }
  held.clear();
  Slots one(1, "puts", "x");
  ASSERT_OK(one.Take("alone"));
}

TEST(LogThrottleTest, ALoopOfRefusalsIsAFewLines) {
  LogThrottle throttle;
  const auto begin = LogThrottle::Clock::now();
  int lines = 0;
  for (int i = 0; i < 10000; ++i) lines += throttle.Line(begin).has_value();
  EXPECT_LE(lines, 21);
  const auto later = throttle.Line(begin + std::chrono::hours(1));
  ASSERT_TRUE(later);
  EXPECT_NE(later->find("lines like it were left out"), std::string::npos);
  EXPECT_EQ(*throttle.Line(begin + std::chrono::hours(2)), "");
}

}  // namespace
}  // namespace prefixd::daemon
