// Runs random operations beside a plain map of everything put, on both I/O backends, with
// reopening, blobs, verification and damage that is found and repaired in between; nothing crashes.
#include "tests/reliability/harness/harness.h"
#include "tests/reliability/harness/report.h"
#include "tests/reliability/workload/workload.h"

namespace prefixd::storage::reliability {

Prepared PrepareRandom(bool) {
  const auto cycle = [](uint64_t, uint64_t seed, Journal& report) {
    const Scratch scratch;
    const auto dir = scratch.path() / "store", errors = scratch.path() / "errors";
    Truth truth;
    Journal journal;
    const WorkloadPlan plan{.dir = dir,
                            .seed = seed,
                            .operations = 200,
                            .spoil = true,
                            .io = seed % 2 ? IoBackend::kThreads : IoBackend::kAuto};
    const ChildEnd end = RunChild(
        [&] {
          Workload workload(plan, truth, journal);
          if (workload.Open()) workload.Run();
          workload.Close();
          return 0;
        },
        errors);
    Absorb(journal, truth, report, "while it ran");
    if (!end.exited || end.code != 0) report.Violation(end.Describe() + Tail(errors));
    report.Count(200, "operations");
    CheckInChild("random", dir, truth, journal, report, errors);
  };
  return {.cycle = cycle};
}

}  // namespace prefixd::storage::reliability
