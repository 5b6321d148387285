// Runs the reliability harnesses in CI size. docs/reliability.md says what each of them proves.
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>

#include "storage/catalog/store_dir.h"
#include "tests/reliability/harness/harness.h"
#include "tests/reliability/harness/report.h"
#include "tests/reliability/workload/checker.h"
#include "tests/reliability/workload/workload.h"
#include "tests/storage/store_fixture.h"
#include "tests/support/seed.h"
#include "tests/support/test.h"

namespace prefixd::storage::reliability {
namespace {

using prefixd::testing::Seed;

Totals Run(const CyclesPlan& plan, const Cycle& cycle) {
  Totals totals = RunCycles(plan, cycle);
  std::printf("[ INFO     ] %llu cycles, %s\n", static_cast<unsigned long long>(totals.cycles),
              Totals::Text(totals.counts).c_str());
  return totals;
}

// Runs the CI size of a harness and expects no violation.
void Prove(const char* name) {
  const Harness& harness = FindHarness(name);
  const Prepared prepared = harness.prepare(/*torture=*/false);
  if (!prepared.skipped.empty()) GTEST_SKIP() << prepared.skipped;
  CyclesPlan plan;
  plan.seed = Seed(name);
  plan.end = prepared.cycles > 0 ? prepared.cycles : harness.ci;
  const Totals totals = Run(plan, prepared.cycle);
  EXPECT_EQ(totals.violations, std::vector<std::string>{});
  if (totals.violations.empty()) {
    EXPECT_EQ(totals.cycles, plan.end);
  }
}

// Makes a negative control: within `bound` cycles the harness must see the planted fault.
void SeenToFail(const char* name, uint64_t bound, const Cycle& cycle) {
  CyclesPlan plan;
  plan.seed = Seed(name);
  plan.end = bound;
  plan.batch = 4;
  const Totals totals = Run(plan, cycle);
  ASSERT_FALSE(totals.violations.empty()) << "the harness did not see it";
  std::printf("[ INFO     ] seen: %s\n", totals.violations.front().c_str());
}

// The checker of all harnesses sees one damaged byte, one lost file and one stray file.
TEST(Checker, SeesDamageLossAndLeaks) {
  const Scratch scratch;
  const auto dir = scratch.path() / "store";
  const uint64_t seed = Seed("Checker");
  Truth truth;
  Journal journal, report;
  const auto violations = [&] {
    Truth as_it_was = truth;
    CheckInChild("checker", dir, as_it_was, journal, report, {});
    Totals totals;
    totals.Add(report.Take());
    return totals.violations;
  };
  RunChild([&] {
    Workload workload({.dir = dir, .seed = seed}, truth, journal);
    if (workload.Open() && workload.Put()) workload.PutBlob();
    return 0;
  });
  Absorb(journal, truth, report, "");
  ASSERT_EQ(truth.Sure().size(), 1u);
  const auto sound = scratch.path() / "sound";
  std::filesystem::copy(dir, sound, std::filesystem::copy_options::recursive);
  EXPECT_EQ(violations(), std::vector<std::string>{});
  const auto restore = [&] {
    std::filesystem::remove_all(dir);
    std::filesystem::copy(sound, dir, std::filesystem::copy_options::recursive);
  };
  const auto segment = SegmentPath(dir, truth.at(1).id->bytes);
  restore();
  FlipByte(segment, 4096 + 10);
  EXPECT_FALSE(violations().empty()) << "a damaged byte";
  restore();
  std::filesystem::remove(segment);
  EXPECT_FALSE(violations().empty()) << "a lost file";
  restore();
  std::ofstream(dir / "segments" / "stray") << "stray";
  EXPECT_FALSE(violations().empty()) << "a stray file";
}

TEST(Disk, NothingIsLostAndNothingWrongIsServedAfterACrash) { Prove("disk"); }

TEST(DiskControl, SegmentsThatAreNotSyncedAreSeen) {
  SeenToFail("DiskControl.Sync", 200, [](uint64_t, uint64_t seed, Journal& report) {
    DiskCycle(seed, report, Lie::kSegmentSync);
  });
}

TEST(DiskControl, DirectoriesThatAreNotSyncedAreSeen) {
  SeenToFail("DiskControl.DirectorySync", 200, [](uint64_t, uint64_t seed, Journal& report) {
    DiskCycle(seed, report, Lie::kDirectorySync);
  });
}

// After an acknowledged compaction its blobs are there as well.
TEST(DiskControl, BlobsOfAMergeThatAreNotSyncedAreSeen) {
  SeenToFail("DiskControl.MergeSync", 200, [](uint64_t, uint64_t seed, Journal& report) {
    Journal all;
    DiskCycle(seed, all, Lie::kBlobSync, /*merge_percent=*/40);
    for (const Event& event : all.Take()) {
      if (event.kind != EventKind::kViolation) continue;
      if (event.Text().find(kCompactedBlobLost) != std::string::npos)
        report.Violation(event.Text());
    }
  });
}

TEST(Faults, EveryCallMayFailOnceAndForGood) { Prove("faults"); }

TEST(Kill, AtNamedPointsAndRandomMoments) { Prove("kill"); }

TEST(Kill, ThereAreEnoughNamedPoints) {
  EXPECT_GE(FindHarness("kill").prepare(/*torture=*/false).points.size(), 25u);
}

TEST(Persist, WhatWasAcknowledgedIsThereAndMarkedAsItWas) { Prove("persist"); }

TEST(Power, NothingIsLostWhenTheFileSystemIsShutDown) { Prove("power"); }

TEST(Damage, NothingWrongIsServed) { Prove("damage"); }

TEST(DamageControl, WithoutChecksumsWrongBytesAreSeen) {
  SeenToFail("DamageControl", 4, [](uint64_t number, uint64_t seed, Journal& report) {
    DamageCycle(1000 + number, seed, report, /*checksums=*/false);
  });
}

TEST(Random, BehavesLikeAPlainMap) { Prove("random"); }

// Two real processes: the second one's error names the first, and it gets the store when the first
// is gone.
TEST(TwoProcesses, TheSecondIsRefusedWithTheOwnersPid) {
  const Scratch scratch;
  const StoreOptions options = WorkloadOptions(scratch.path() / "store");
  Journal first_says, second_says;
  Child first([&] {
    const auto store = PrefixStore::Open(options);
    first_says.AppendText(EventKind::kPoint, store.ok() ? "open" : store.error().ToString());
    ::pause();
    return 0;
  });
  std::vector<Event> said;
  while (said.empty() && !first.WaitFor(std::chrono::milliseconds(2))) said = first_says.Take();
  ASSERT_EQ(said.size(), 1u);
  ASSERT_EQ(said[0].Text(), "open");
  const auto open_it = [&] {
    const auto store = PrefixStore::Open(options);
    second_says.AppendText(EventKind::kPoint, store.ok() ? "open" : store.error().ToString());
    return 0;
  };
  RunChild(open_it);
  said = second_says.Take();
  ASSERT_EQ(said.size(), 1u);
  EXPECT_NE(said[0].Text().find("failed_precondition"), std::string::npos) << said[0].Text();
  EXPECT_NE(said[0].Text().find("process " + std::to_string(first.pid())), std::string::npos)
      << said[0].Text();
  first.Kill();
  (void)first.Wait();
  RunChild(open_it);
  said = second_says.Take();
  ASSERT_EQ(said.size(), 1u);
  EXPECT_EQ(said[0].Text(), "open");
}

}  // namespace
}  // namespace prefixd::storage::reliability
