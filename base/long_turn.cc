#include "base/long_turn.h"

#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace prefixd {
namespace {

constexpr uint64_t kLongTurnNs = 20'000'000;

// struct sched_attr of the kernel's interface; its header and <sched.h> do not go together.
struct Attributes {
  uint32_t size = sizeof(Attributes), policy = SCHED_OTHER;
  uint64_t flags = 0;
  int32_t nice = 0;
  uint32_t priority = 0;
  uint64_t runtime_ns = 0, deadline_ns = 0, period_ns = 0;
  uint32_t least_utilisation = 0, most_utilisation = 0;
};
static_assert(sizeof(Attributes) == 56);

}  // namespace

void LongTurn::Begin() noexcept {
  if (begun_) return;
  begun_ = true;
  Attributes now;
  if (::syscall(SYS_sched_getattr, 0, &now, sizeof(now), 0) != 0) return;
  // Kernels before 6.12 say 0.
  if (now.policy != SCHED_OTHER || now.runtime_ns == 0) return;
  nice_ = now.nice;
  turn_ns_ = now.runtime_ns;
  Attributes wish;
  wish.nice = nice_;
  wish.runtime_ns = kLongTurnNs;
  asked_ = ::syscall(SYS_sched_setattr, 0, &wish, 0) == 0;
}

void LongTurn::End() noexcept {
  if (asked_) {
    Attributes own;
    own.nice = nice_;
    own.runtime_ns = turn_ns_;
    ::syscall(SYS_sched_setattr, 0, &own, 0);
  }
  begun_ = asked_ = false;
}

}  // namespace prefixd
