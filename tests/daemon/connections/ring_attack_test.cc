// Clients that write what they like into their ring: a call that makes no sense fails, and nothing
// else happens.
#include <fcntl.h>

#include <atomic>
#include <limits>
#include <random>

#include "tests/daemon/connections/ring_fixture.h"
#include "tests/support/seed.h"

namespace prefixd::testing {
namespace {

using wire::kStepEntryBytes;
using wire::kStepHeaderBytes;

template <typename T>
void Overwrite(std::vector<std::byte>& bytes, size_t at, T value) {
  std::memcpy(bytes.data() + at, &value, sizeof(value));
}

TEST_F(RingTest, MalformedCallsFailAlone) {
  RingClient evil(daemon_->path());
  ASSERT_TRUE(evil.has_ring());
  const auto good = evil.Request(2, 0);
  struct Case {
    const char* what;
    size_t at;
    uint32_t value;
  };
  const auto slot_bytes = static_cast<uint32_t>(evil.ring().shape().slot_bytes);
  const std::vector<Case> cases = {
      {"version", 0, wire::kStepFrameVersion + 1},
      {"flags", 4, 1},
      {"no steps", 8, 0},
      {"fewer steps than entries", 8, 1},
      {"more steps than entries", 8, 5},
      {"too many steps", 8, wire::kMaxStepsPerFrame + 1},
      {"more steps than there are numbers", 8, UINT32_MAX},
      {"no bytes", 12, 0},
      {"too few bytes", 12, uint32_t(good.size()) - 64},
      {"too many bytes", 12, uint32_t(good.size()) + 64},
      {"more bytes than the slot", 12, slot_bytes + 1},
      {"all the bytes there are", 12, UINT32_MAX},
      {"flags of a step", kStepHeaderBytes + 12, 4},
      {"a row that is not appended", kStepHeaderBytes + 40, 64},
      {"a row too large", kStepHeaderBytes + 44, UINT32_MAX},
      {"a query too large", kStepHeaderBytes + 16, UINT32_MAX},
      {"an output too large for the slot", kStepHeaderBytes + 20, slot_bytes / 4},
      {"an output too large for memory", kStepHeaderBytes + 20, UINT32_MAX},
      {"lse too large", kStepHeaderBytes + 24, UINT32_MAX},
      {"a tail too large", kStepHeaderBytes + kStepEntryBytes + 28, slot_bytes},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.what);
    auto bad = good;
    Overwrite(bad, c.at, c.value);
    evil.Ask(5, bad);
    evil.Await(5);
    const auto outcome = evil.Outcome(5, 2);
    ASSERT_TRUE(outcome && !outcome->ok());
    EXPECT_EQ(CodeName(static_cast<Code>(outcome->code - 1)), "invalid_argument")
        << evil.Message(5, *outcome);
    evil.Ask(6, good);  // the connection goes on
    evil.Await(6);
    const auto next = evil.Outcome(6, 2);
    ASSERT_TRUE(next && next->ok());
  }
  const auto stats = client_->Server();
  EXPECT_EQ(stats->calls_failed, cases.size());
  EXPECT_EQ(stats->ring_steps, 2 * cases.size());
}

// Steps that make no sense, in a call that does.
TEST_F(RingTest, AStrangeStepFailsAlone) {
  RingClient evil(daemon_->path());
  ASSERT_TRUE(evil.has_ring());
  const auto good = evil.Request(2, 0);
  const auto result = [&](size_t at, uint64_t value, size_t bytes) {
    auto bad = good;
    std::memcpy(bad.data() + at, &value, bytes);
    evil.Ask(0, bad);
    evil.Await(0);
    const auto outcome = evil.Outcome(0, 2);
    EXPECT_TRUE(outcome && outcome->ok());
    const auto slot = evil.ring().slot(0);
    const auto first = wire::DecodeOutcome(slot.subspan<32, wire::kStepResultBytes>());
    const auto second =
        wire::DecodeOutcome(slot.subspan<32 + wire::kStepResultBytes, wire::kStepResultBytes>());
    EXPECT_TRUE(second.ok());
    return first.ok() ? std::string("ok")
                      : std::string(CodeName(static_cast<Code>(first.code - 1)));
  };
  EXPECT_EQ(result(kStepHeaderBytes, evil.session(), 8), "ok");
  EXPECT_EQ(result(kStepHeaderBytes, 99, 8), "not_found");
  EXPECT_EQ(result(kStepHeaderBytes, UINT64_MAX, 8), "not_found");
  EXPECT_EQ(result(kStepHeaderBytes + 8, 77, 4), "invalid_argument");   // layer
  EXPECT_EQ(result(kStepHeaderBytes + 20, 63, 4), "invalid_argument");  // y, within its 64 bytes
  EXPECT_EQ(result(kStepHeaderBytes + 12, 1, 4), "internal");           // no room for its report
}

// A session is found by its own connection alone.
TEST_F(RingTest, NobodyStepsSessionsOfOthers) {
  const auto session = Attach(*client_);  // handle 1 there
  RingClient evil(daemon_->path());
  ASSERT_TRUE(evil.has_ring());
  const uint64_t before = control_->attached;
  auto request = evil.Request(1, 0);
  Overwrite(request, kStepHeaderBytes, uint64_t{evil.session() + 1});
  evil.Ask(0, request);
  evil.Await(0);
  const auto outcome =
      wire::DecodeOutcome(evil.ring().slot(0).subspan<32, wire::kStepResultBytes>());
  EXPECT_EQ(CodeName(static_cast<Code>(outcome.code - 1)), "not_found");
  EXPECT_EQ(control_->attached, int(before));
}

// A client that steps without a pause and asks to be polled has no thread to itself while others
// wait for one: another tenant's client where there is one thread, and its own tenant's where that
// may have no second one.
TEST_F(RingTest, PollingKeepsNoThreadFromThoseWhoWait) {
  constexpr int kSteps = 5;
  for (const uint64_t threads : {1, 2}) {
    daemon::Config config;
    config.step_threads = threads;
    config.polling_threads = threads;
    Start(config);
    const auto greedy = daemon_->Connect({.spin_us = 2000});
    const auto modest = daemon_->Connect({.tenant = threads == 1 ? "other" : "", .spin_us = 0});
    const auto session = Attach(*greedy);
    const auto others =
        modest->Attach({.model = "m", .prefix = threads == 1 ? "other/prefix" : "prefix"});
    ASSERT_OK(others);
    std::atomic<bool> stop{false};
    std::atomic<uint64_t> taken{0};
    std::thread loop([&] {
      for (; !stop; ++taken) EXPECT_OK(Step(*session, 0));
    });
    while (taken < 100) std::this_thread::yield();
    // In turns, one for one; polled to the end of its spin it takes a hundred for each. Of many
    // rounds one goes by in which the machine keeps nobody waiting for something else.
    uint64_t fewest = std::numeric_limits<uint64_t>::max();
    for (int round = 0; round < 50 && fewest >= 20 * kSteps; ++round) {
      const uint64_t before = taken;
      for (int i = 0; i < kSteps; ++i) EXPECT_OK(Step(**others, 0));
      fewest = std::min<uint64_t>(fewest, taken - before);
    }
    stop = true;
    loop.join();
    EXPECT_LT(fewest, 20u * kSteps) << threads << " threads";
  }
}

// Random bytes over the whole region, all the time, and bells without end; the daemon lives, and
// another client's answers are right. What is asked for and answered in the middle of it is chance.
TEST_F(RingTest, AnotherClientsStepsAreRightBesideGarbage) {
  RingClient evil(daemon_->path());
  ASSERT_TRUE(evil.has_ring());
  const auto good = evil.Request(3, 0);
  const auto region = std::span(evil.ring().slot(0).data() - 4096, evil.ring().shape().bytes());
  // The client may change what the descriptor of the bell does, too.
  ::fcntl(evil.ring().bell_fd(), F_SETFL, 0);
  std::atomic<bool> stop{false};
  std::thread vandal([&] {
    std::mt19937_64 rng(Seed("Ring.Garbage"));
    while (!stop) {
      const auto slot = static_cast<uint32_t>(rng() % evil.ring().shape().slots);
      std::ranges::copy(good, evil.ring().slot(slot).begin());
      evil.ring().Ask(slot);
      for (int i = 0; i < 30; ++i) {
        // Mostly headers and states, where it matters.
        const size_t at =
            rng() % 2 ? rng() % 4096 : 4096 + slot * evil.ring().slot(0).size() + rng() % 256;
        *reinterpret_cast<volatile unsigned char*>(&region[at]) = static_cast<uint8_t>(rng());
      }
    }
  });
  const auto session = Attach(*client_);
  for (int i = 0; i < 500; ++i) EXPECT_OK(Step(*session, 0));
  stop = true;
  vandal.join();
  EXPECT_TRUE(evil.alive());
  EXPECT_OK(Step(*session, 0));
}

}  // namespace
}  // namespace prefixd::testing
