// Tests that chats that are made up have the statistics that are published of real ones.
#include "measure/capacity/chat_log.h"

#include <set>

#include "measure/capacity/cache_model.h"
#include "tests/support/test.h"

namespace prefixd::bench {
namespace {

TEST(ChatLogTest, HasThePublishedStatistics) {
  const RequestLog log = ChatRequests({}, 512);
  EXPECT_NEAR(double(log.requests.size()), 12'031, 600);
  EXPECT_NEAR(double(log.input_tokens()) / double(log.requests.size()), 12'035, 700);
  EXPECT_NEAR(log.seconds(), 3600, 10);
  EXPECT_NEAR(ReplayRequests(log, 0, Eviction::kLru).hit_share(), 0.40, 0.02);
  double output = 0;
  for (const Request& r : log.requests) output += r.output_tokens;
  EXPECT_NEAR(output / double(log.requests.size()), 343, 5);
}

TEST(ChatLogTest, IsALogThatMayBeRead) {
  ChatSpec spec;
  spec.hours = 0.1;
  const RequestLog log = ChatRequests(spec, 512);
  double before = 0;
  std::set<uint64_t> first;
  for (const Request& r : log.requests) {
    EXPECT_GE(r.seconds, before);
    before = r.seconds;
    EXPECT_EQ(r.blocks.size(), (r.input_tokens + 511) / 512);
    EXPECT_LE(r.input_tokens, spec.most_tokens);
    EXPECT_EQ(std::set<uint64_t>(r.blocks.begin(), r.blocks.end()).size(), r.blocks.size());
    first.insert(r.blocks.front());
  }
  EXPECT_EQ(first.size(), 1u);
  EXPECT_EQ(ChatRequests(spec, 512).requests.back().blocks, log.requests.back().blocks);
}

}  // namespace
}  // namespace prefixd::bench
