// Makes real power cuts under load: of a store that all kinds of operations change, and of one
// whose sessions append own tokens, move and persist them. The file system is mounted anew after
// each, and the store on it is checked.
#include <chrono>
#include <filesystem>
#include <random>

#include "tests/reliability/disk/cut_disk.h"
#include "tests/reliability/harness/harness.h"
#include "tests/reliability/harness/report.h"
#include "tests/reliability/workload/persister.h"
#include "tests/reliability/workload/workload.h"

namespace prefixd::storage::reliability {
namespace fs = std::filesystem;
namespace {

constexpr int kCutsPerDisk = 5;

// Lets `child` work for a while, and cuts the power of its disk under it.
Status CutUnder(Child& child, CutDisk& disk, std::mt19937_64& rng) {
  PREFIXD_TRY(disk.Cut(rng() % 2 == 0));
  child.Kill();
  (void)child.Wait();
  return {};
}
void LetWork(Child& child, std::mt19937_64& rng) {
  (void)child.WaitFor(std::chrono::microseconds(rng() % 400'000));
}

// Makes several cuts of one store on one file system.
Status CutOperations(const fs::path& scratch, uint64_t seed, int cuts, Journal& report) {
  PREFIXD_TRY(OwnMounts());
  PREFIXD_ASSIGN(const auto disk, CutDisk::Make(scratch));
  const fs::path errors = scratch / "errors", dir = disk->path() / "store";
  std::mt19937_64 rng(seed);
  Truth truth;
  Journal journal;
  for (int cut = 0; cut < cuts; ++cut) {
    PREFIXD_TRY(disk->Mount());
    WorkloadPlan plan{.dir = dir, .seed = rng(), .errors_are_fine = true};
    plan.io = rng() % 2 ? IoBackend::kThreads : IoBackend::kAuto;
    Child child(
        [&] {
          Workload workload(plan, truth, journal);
          if (workload.Open()) workload.Run();
          return 1;
        },
        errors);
    LetWork(child, rng);
    // The system call takes a while, and an fdatasync that it overtakes may succeed although
    // nothing is written any more. In a real cut no process is left to see that.
    journal.Cut();
    PREFIXD_TRY(CutUnder(child, *disk, rng));
    Absorb(journal, truth, report, Where("power", "before cut " + std::to_string(cut)));
    disk->Unmount();
    PREFIXD_TRY(disk->Mount());
    CheckInChild("power", dir, truth, journal, report, errors);
    disk->Unmount();
    report.Count(1, "power cuts");
  }
  return {};
}

// The same under sessions that append, move and persist.
Status CutSessions(const fs::path& scratch, uint64_t seed, int cuts, Journal& report) {
  PREFIXD_TRY(OwnMounts());
  PREFIXD_ASSIGN(const auto disk, CutDisk::Make(scratch));
  const fs::path errors = scratch / "errors", dir = disk->path() / "store";
  std::mt19937_64 rng(seed);
  const auto all = Persister::Story(seed);
  SharedProgress progress;
  for (int cut = 0; cut < cuts; ++cut) {
    PREFIXD_TRY(disk->Mount());
    const uint64_t run = rng();
    Child child(
        [&] {
          Persister persister(dir, all, progress, report);
          if (persister.Open()) persister.Run(run, [] {});
          return 0;
        },
        errors);
    LetWork(child, rng);
    progress->cut = true;
    PREFIXD_TRY(CutUnder(child, *disk, rng));
    progress->cut = false;
    disk->Unmount();
    PREFIXD_TRY(disk->Mount());
    CheckSessionsInChild("power", dir, all, progress, report, errors);
    disk->Unmount();
    report.Count(1, "power cuts under sessions");
  }
  progress.Report(report);
  return {};
}

}  // namespace

Prepared PreparePower(bool) {
  const auto cycle = [](uint64_t number, uint64_t seed, Journal& report) {
    const Scratch scratch(/*on_device=*/true);
    // The child process alone has the mounts.
    const ChildEnd end = RunChild([&] {
      const auto cuts = number % 2 == 0 ? CutOperations : CutSessions;
      Status cut = cuts(scratch.path(), seed, kCutsPerDisk, report);
      if (!cut.ok()) report.Violation(Where("power", cut.error().ToString()));
      return 0;
    });
    if (!end.exited) report.Violation(Where("power", end.Describe()));
  };
  // One cut shows whether this machine allows it.
  const Scratch scratch(/*on_device=*/true);
  Journal report;
  std::string why;
  RunChild([&] {
    Status cut = CutOperations(scratch.path(), 1, 1, report);
    if (!cut.ok()) report.AppendText(EventKind::kPoint, cut.error().message);
    return 0;
  });
  for (const Event& event : report.Take()) {
    if (event.kind == EventKind::kPoint) why = event.Text();
  }
  if (!why.empty()) {
    return {.skipped = "power cuts need root, loop devices and ext4; here: " + why};
  }
  return {.cycle = cycle};
}

}  // namespace prefixd::storage::reliability
