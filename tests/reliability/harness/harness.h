// Declares the harnesses: each proves one property of the store, cycle by cycle. The CI tests
// (reliability_test.cc) run a fixed number of cycles, the torture driver (torture.cc) as many as
// its time allows.
#pragma once

#include <span>
#include <string>

#include "tests/reliability/disk/sim_disk.h"
#include "tests/reliability/harness/cycles.h"

namespace prefixd::storage::reliability {

struct Prepared {
  Cycle cycle;
  uint64_t cycles = 0;  // everything was tried once after this many; 0: random without end
  std::vector<std::string> points;  // the named points found (kill)
  std::string skipped;              // why this machine cannot run it; empty: it can
};

struct Harness {
  const char* name;
  const char* what;
  uint64_t ci, torture;  // numbers of cycles
  Prepared (*prepare)(bool torture);
};

std::span<const Harness> Harnesses();
const Harness& FindHarness(const std::string& name);

// Defined in disk_harness.cc. The disk crashes at a random call, one to three times in a row.
Prepared PrepareDisk(bool torture);
// Defined in fault_harness.cc. CI tries a part of the calls, the torture run every one.
Prepared PrepareFaults(bool torture);
// Defined in kill_harness.cc.
Prepared PrepareKill(bool torture);
// Defined in persist_harness.cc. A cycle is three kills.
Prepared PreparePersist(bool torture);
// Defined in power_harness.cc. A cycle is five cuts.
Prepared PreparePower(bool torture);
// Defined in damage_harness.cc. The first 22 cycles change every byte of metadata, 9 more those of
// stored orders, later ones rows.
Prepared PrepareDamage(bool torture);
void DamageCycle(uint64_t number, uint64_t seed, Journal& report, bool checksums);
void DiskCycle(uint64_t seed, Journal& report, Lie lie, uint32_t merge_percent = 0);
// Defined in random_harness.cc.
Prepared PrepareRandom(bool torture);

}  // namespace prefixd::storage::reliability
