#include <cstdio>
#include <cstdlib>

#include "tests/reliability/harness/harness.h"

namespace prefixd::storage::reliability {
namespace {

constexpr Harness kHarnesses[] = {
    {"disk", "a simulated disk crashes; unsynced writes are kept, dropped, torn or corrupted", 1000,
     100'000, PrepareDisk},
    {"faults", "the N-th system call fails, for every N, once and for good", 0, 20'000,
     PrepareFaults},
    {"kill", "kill -9 at every named point and at random moments", 100, 10'000, PrepareKill},
    {"persist", "kill -9 while sessions persist their own tokens, three times a cycle", 20, 2000,
     PreparePersist},
    {"power", "an ext4 file system is shut down under load, five times a cycle", 10, 200,
     PreparePower},
    {"damage", "bytes and pages at rest are changed", 43, 1231, PrepareDamage},
    {"random", "random operations against a plain map, on both I/O backends", 30, 10'000,
     PrepareRandom},
};

}  // namespace

std::span<const Harness> Harnesses() { return kHarnesses; }

const Harness& FindHarness(const std::string& name) {
  for (const Harness& harness : kHarnesses) {
    if (name == harness.name) return harness;
  }
  std::fprintf(stderr, "no harness is called '%s'\n", name.c_str());
  std::abort();
}

}  // namespace prefixd::storage::reliability
