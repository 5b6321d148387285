#include <cstdio>
#include <cstdlib>

#include <CLI/CLI.hpp>
#include <chrono>

#include "tests/reliability/harness.h"

using namespace prefixd::storage::reliability;

int main(int argc, char** argv) {
  uint64_t n = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 10;
  auto t0 = std::chrono::steady_clock::now();
  auto p = FindHarness(argv[3]).prepare(true);
  std::printf("%s\n", p.skipped.c_str());
  if (p.cycles) n = std::min(n, p.cycles);
  CyclesPlan plan;
  plan.end = n;
  plan.seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
  plan.max_violations = 10;
  auto totals = RunCycles(plan, p.cycle);
  for (auto& [k, v] : totals.counts) std::printf("%s %lu\n", k.c_str(), v);
  for (auto& v : totals.violations) std::printf("V %s\n", v.c_str());
  std::printf("%lu cycles %.2f s\n", totals.cycles,
              std::chrono::duration<double>(std::chrono::steady_clock::now() - t0).count());
}
