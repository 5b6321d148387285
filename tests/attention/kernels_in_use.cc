// Selects kernels for the tests of attention/ that link this: with PREFIXD_TEST_KERNELS=NAME in the
// environment they run with that instruction set's kernels, and are skipped (exit code 77) where
// there are none, and where they are those that the tests run with anyway.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "attention/kernels/kernels.h"

namespace prefixd {
namespace {

std::unique_ptr<ScopedKernels> FromEnvironment() {
  const char* name = std::getenv("PREFIXD_TEST_KERNELS");
  if (name == nullptr) return nullptr;
  for (Isa isa : kAllIsas) {
    const KernelTable* table = KernelsFor(isa);
    if (table == nullptr || std::strcmp(table->name, name) != 0) continue;
    if (table != &Kernels()) return std::make_unique<ScopedKernels>(*table);
    std::fprintf(stderr, "skipped: tests run with %s kernels anyway\n", name);
    std::exit(77);
  }
  std::fprintf(stderr, "skipped: no %s kernels here\n", name);
  std::exit(77);
}

const std::unique_ptr<ScopedKernels> kInUse = FromEnvironment();

}  // namespace
}  // namespace prefixd
