#include "tests/reliability/harness/harness.h"
#include "tests/reliability/harness/report.h"
#include "tests/reliability/workload/checker.h"
#include "tests/reliability/workload/workload.h"

namespace prefixd::storage::reliability {
namespace fs = std::filesystem;

void DiskCycle(uint64_t seed, Journal& report, Lie lie, uint32_t merge_percent) {
  const Scratch scratch;
  const fs::path errors = scratch.path() / "errors";
  std::mt19937_64 rng(seed);
  Truth truth;
  Journal journal;
  fs::path live = scratch.path() / "disk0";
  fs::create_directory(live);
  const uint64_t crashes = 1 + rng() % 3;
  for (uint64_t i = 1; i <= crashes; ++i) {
    DiskPlan disk_plan{.root = live,
                       .image = scratch.path() / ("disk" + std::to_string(i)),
                       .seed = rng(),
                       // Opening takes about 60 calls: a quarter of the crashes come near it, the
                       // others mostly later.
                       .crash_at = 1 + rng() % (rng() % 4 == 0 ? 80 : 500),
                       .lie = lie};
    const uint64_t workload_seed = rng();
    const ChildEnd end = RunChild(
        [&] {
          SimDisk disk(disk_plan);
          disk.Start();
          Workload workload(
              {.dir = live / "store", .seed = workload_seed, .merge_percent = merge_percent}, truth,
              journal);
          if (workload.Open()) workload.Run();
          return 1;
        },
        errors);
    Absorb(journal, truth, report, Where("disk", "before crash " + std::to_string(i)));
    if (end.code != SimDisk::kCrashed) {
      report.Violation(Where("disk", end.Describe() + Tail(errors)));
      return;
    }
    report.Count(1, "crashes");
    live = disk_plan.image;
  }
  CheckInChild("disk", live / "store", truth, journal, report, errors);
}

Prepared PrepareDisk(bool) {
  return {.cycle = [](uint64_t, uint64_t seed, Journal& report) {
    DiskCycle(seed, report, Lie::kNone);
  }};
}

}  // namespace prefixd::storage::reliability
