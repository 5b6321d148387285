// Tests that a thread asks for long turns and gets its own back.
#include "base/long_turn.h"

#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <thread>

#include "tests/support/test.h"

namespace prefixd {
namespace {

// The kernel's struct sched_attr: the policy is at byte 4, nice at 16, the length of turns at 24.
struct Wish {
  uint32_t policy = 0;
  int32_t nice = 0;
  uint64_t turn_ns = 0;
};

Wish OfThisThread() {
  std::array<std::byte, 56> attributes{};
  Wish wish;
  if (::syscall(SYS_sched_getattr, 0, attributes.data(), attributes.size(), 0) != 0) return wish;
  std::memcpy(&wish.policy, attributes.data() + 4, sizeof(wish.policy));
  std::memcpy(&wish.nice, attributes.data() + 16, sizeof(wish.nice));
  std::memcpy(&wish.turn_ns, attributes.data() + 24, sizeof(wish.turn_ns));
  return wish;
}

TEST(LongTurn, IsAskedForAndGivenBack) {
  std::thread([] {
    const Wish own = OfThisThread();
    const bool known = own.turn_ns > 0;  // Linux 6.12
    {
      LongTurn turn;
      EXPECT_EQ(OfThisThread().turn_ns, own.turn_ns);
      turn.Begin();
      turn.Begin();
      EXPECT_EQ(OfThisThread().turn_ns, known ? 20'000'000u : 0u);
      turn.End();
      EXPECT_EQ(OfThisThread().turn_ns, own.turn_ns);
      turn.Begin();  // again, until it is destroyed
      EXPECT_EQ(OfThisThread().turn_ns, known ? 20'000'000u : 0u);
      EXPECT_EQ(OfThisThread().nice, own.nice);
    }
    EXPECT_EQ(OfThisThread().turn_ns, own.turn_ns);
  }).join();
}

TEST(LongTurn, LeavesOtherPoliciesAlone) {
  std::thread([] {
    const sched_param none{};
    ASSERT_EQ(::sched_setscheduler(0, SCHED_BATCH, &none), 0);
    const Wish own = OfThisThread();
    LongTurn turn;
    turn.Begin();
    EXPECT_EQ(OfThisThread().policy, static_cast<uint32_t>(SCHED_BATCH));
    EXPECT_EQ(OfThisThread().turn_ns, own.turn_ns);
  }).join();
}

}  // namespace
}  // namespace prefixd
