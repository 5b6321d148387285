// Fails the N-th system call, for every N of a short story, once and for good. Meanwhile no wrong
// data may be served; afterwards, when the power has gone as well, everything acknowledged must be
// there. An assertion of RocksDB counts as the power cut.
#include "tests/reliability/harness/harness.h"
#include "tests/reliability/harness/report.h"
#include "tests/reliability/workload/workload.h"

namespace prefixd::storage::reliability {
namespace fs = std::filesystem;
namespace {

struct FaultCase {
  Fault fault;
  bool stays;
  uint64_t at;
};

// Does what a store does in its life, in an order that chance does not change.
void Story(Workload& w) {
  if (!w.Open()) return;
  w.Put();
  w.Put();
  w.PutBlob();
  w.GetBlob();
  w.Read();
  w.AbortPut();
  w.Remove();
  w.PutBlob();
  w.Match();
  w.Put();
  w.Recluster();
  w.Compact();
  w.Compress();
  w.Verify();
  if (!w.Reopen()) return;
  w.Read();
  w.Put();
  w.Read();
}

// `faulty_calls`: the calls of the story that the fault can befall.
ChildEnd Tell(const fs::path& dir, const FaultCase& fault, uint64_t seed, Truth& truth,
              Journal& journal, bool close, const fs::path& errors) {
  fs::create_directory(dir / "disk");
  return RunChild(
      [&] {
        SimDisk disk({.root = dir / "disk",
                      .image = dir / "image",
                      .seed = seed,
                      .fault = fault.fault,
                      .fault_at = fault.at,
                      .fault_stays = fault.stays});
        disk.Start();
        Workload workload({.dir = dir / "disk" / "store", .seed = 1, .errors_are_fine = true},
                          truth, journal);
        Story(workload);
        if (close) workload.Close();
        journal.Count(static_cast<uint32_t>(disk.faulty_calls()), "calls that could fail");
        if (disk.injected() > 0) journal.Count(1, "stories with a fault");
        disk.Crash(SimDisk::kCrashed);
        return 0;
      },
      errors);
}

void FaultCycle(const FaultCase& fault, uint64_t seed, Journal& report) {
  const Scratch scratch;
  const fs::path errors = scratch.path() / "errors";
  const std::string what = std::string("faults (") + FaultName(fault.fault) +
                           (fault.stays ? " for good" : " once") + " at call " +
                           std::to_string(fault.at) + ")";
  Truth truth;
  Journal journal;
  const ChildEnd end = Tell(scratch.path(), fault, seed, truth, journal, seed % 2 == 0, errors);
  Absorb(journal, truth, report, Where(what, "under faults"));
  if (end.code == SimDisk::kAborted) {
    report.Count(1, "stories with a fault");
    report.Count(1, "assertions of RocksDB");
  } else if (end.code != SimDisk::kCrashed) {
    report.Violation(Where(what, end.Describe() + Tail(errors)));
    return;
  }
  CheckInChild(what, scratch.path() / "image" / "store", truth, journal, report, errors);
}

// Returns how many calls of the story a fault can befall.
uint64_t CountCalls(Fault fault) {
  const Scratch scratch;
  Truth truth;
  Journal journal;
  Tell(scratch.path(), {fault, false, 0}, 1, truth, journal, true, {});
  Totals totals;
  totals.Add(journal.Take());
  return totals.counts["calls that could fail"];
}

}  // namespace

Prepared PrepareFaults(bool torture) {
  // CI tries every fourth call; the cycle's seed shifts which.
  const uint64_t stride = torture ? 1 : 4;
  auto cases = std::make_shared<std::vector<FaultCase>>();
  for (const Fault fault : kFaults) {
    // A few cycles beyond the last call run the story without a fault, however its threads took
    // turns.
    const uint64_t calls = CountCalls(fault) + 3;
    for (const bool stays : {false, true}) {
      for (uint64_t at = 1; at <= calls; at += stride) cases->push_back({fault, stays, at});
    }
  }
  const auto cycle = [cases, stride](uint64_t number, uint64_t seed, Journal& report) {
    FaultCase fault = (*cases)[number % cases->size()];
    fault.at += seed % stride;
    FaultCycle(fault, seed, report);
  };
  return {.cycle = cycle, .cycles = cases->size()};
}

}  // namespace prefixd::storage::reliability
