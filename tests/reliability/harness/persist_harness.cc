// Kills a process with kill -9 while its sessions persist what they appended, or move it out of
// memory, at a named point of the store's code or at a random moment.
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <random>

#include "storage/io/crash_point.h"
#include "tests/reliability/harness/harness.h"
#include "tests/reliability/harness/report.h"
#include "tests/reliability/workload/persister.h"

namespace prefixd::storage::reliability {
namespace fs = std::filesystem;
namespace {

// A hook is a plain function.
std::atomic<uint64_t> points_left{0};  // 0: none is deadly

void DieAtAnyPoint(const char*) {
  if (points_left.load() > 0 && points_left.fetch_sub(1) == 1) ::kill(::getpid(), SIGKILL);
}

void PersistCycle(uint64_t seed, Journal& report) {
  const Scratch scratch;
  const fs::path errors = scratch.path() / "errors", dir = scratch.path() / "store";
  std::mt19937_64 rng(seed);
  const auto all = Persister::Story(seed);
  SharedProgress progress;
  for (int kill = 0; kill < 3; ++kill) {
    const bool at_point = rng() % 3 != 0;
    const uint64_t point = at_point ? 1 + rng() % 12 : 0, run = rng();
    Child child(
        [&] {
          crash_point_hook = DieAtAnyPoint;
          Persister persister(dir, all, progress, report);
          return persister.Open() && persister.Run(run, [&] { points_left = point; }) ? 0 : 1;
        },
        errors);
    const uint64_t moment = rng() % 150'000;
    if (!at_point && !child.WaitFor(std::chrono::microseconds(moment))) child.Kill();
    const ChildEnd end = child.Wait();
    const bool killed = end.signal == SIGKILL && !end.hung;
    if (!killed && !(end.exited && end.code == 0)) {
      report.Violation(Where("persist", end.Describe() + Tail(errors)));
      return;
    }
    report.Count(1, !killed    ? "processes that stored all"
                    : at_point ? "kills at a named point"
                               : "kills at a random moment");
    CheckSessionsInChild("persist", dir, all, progress, report, errors);
  }
  progress.Report(report);
}

}  // namespace

Prepared PreparePersist(bool) {
  return {.cycle = [](uint64_t, uint64_t seed, Journal& report) { PersistCycle(seed, report); }};
}

}  // namespace prefixd::storage::reliability
