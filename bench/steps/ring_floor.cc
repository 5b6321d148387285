#include "bench/steps/ring_floor.h"

#include <signal.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <thread>

#include "protocol/step_ring.h"

namespace prefixd::bench {
namespace {

using Clock = std::chrono::steady_clock;

[[noreturn]] void AnswerAll(const StepRing& ring, bool spins) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  const int epoll = ::epoll_create1(0);
  epoll_event event{};
  event.events = EPOLLIN | EPOLLET;
  ::epoll_ctl(epoll, EPOLL_CTL_ADD, ring.bell_fd(), &event);
  ring.SetPolling(spins);
  for (uint32_t round = 0;; ++round) {
    if (spins) {
      PollPause(round);
    } else {
      ::epoll_wait(epoll, &event, 1, -1);
    }
    if (!ring.asked(0)) continue;
    ring.Answer(0);
    ring.Wake(0);
  }
}

}  // namespace

Result<std::vector<double>> RingFloor(uint32_t calls, uint32_t pause_us, bool spins) {
  PREFIXD_ASSIGN(const StepRing ring, StepRing::Create({1, 4096}));
  const pid_t pid = ::fork();
  if (pid < 0) return Error{Code::kIo, "fork"};
  if (pid == 0) AnswerAll(ring, spins);
  std::vector<double> us;
  for (uint32_t i = 0; i < calls; ++i) {
    std::this_thread::sleep_for(std::chrono::microseconds(pause_us));
    const auto begun = Clock::now();
    ring.Ask(0);
    for (uint32_t round = 0; !ring.answered(0); ++round) {
      if (spins) {
        PollPause(round);
      } else {
        ring.Sleep(0, std::chrono::seconds(1));
      }
    }
    us.push_back(std::chrono::duration<double, std::micro>(Clock::now() - begun).count());
  }
  ::kill(pid, SIGKILL);
  ::waitpid(pid, nullptr, 0);
  return us;
}

}  // namespace prefixd::bench
