// Keeps cores busy as engines do that spin (OpenMP, BLAS): processes that never sleep.
#pragma once

#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <vector>

namespace prefixd::bench {

class BusyProcesses {
 public:
  // nice: 0 to 19, added to this process's.
  BusyProcesses(uint32_t n, int nice_by) {
    for (uint32_t i = 0; i < n; ++i) {
      const pid_t pid = ::fork();
      if (pid == 0) {
        ::prctl(PR_SET_PDEATHSIG, SIGKILL);
        (void)!::nice(nice_by);
        std::atomic<uint64_t> spun{0};
        while (true) spun.fetch_add(1, std::memory_order_relaxed);
      }
      if (pid > 0) pids_.push_back(pid);
    }
  }
  ~BusyProcesses() {
    for (const pid_t pid : pids_) {
      ::kill(pid, SIGKILL);
      ::waitpid(pid, nullptr, 0);
    }
  }
  BusyProcesses(const BusyProcesses&) = delete;
  BusyProcesses& operator=(const BusyProcesses&) = delete;

 private:
  std::vector<pid_t> pids_;
};

}  // namespace prefixd::bench
