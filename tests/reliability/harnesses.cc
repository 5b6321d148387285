#include <cstdio>
#include <cstdlib>

#include "tests/reliability/harness.h"

namespace prefixd::storage::reliability {
namespace {

constexpr Harness kHarnesses[] = {
    {"disk", "a simulated disk crashes; unsynced writes are kept, dropped, torn or corrupted",
     "cycles", 1000, 100'000, PrepareDisk},
    {"faults", "the N-th system call fails, once and for good", "stories with a fault", 0, 100'000,
     PrepareFaults},
    {"kill", "kill -9 at named points and random moments", "cycles", 100, 10'000, PrepareKill},
    {"power", "a file system is shut down under load", "power cuts", 10, 200, PreparePower},
    {"damage", "bytes and pages at rest are changed", "data flips", 34, 1222, PrepareDamage},
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
