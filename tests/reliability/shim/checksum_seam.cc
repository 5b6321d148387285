#include "tests/reliability/shim/checksum_seam.h"

#include <dlfcn.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

namespace prefixd::storage::reliability {
namespace {
std::atomic<bool> checksums_off{false};

// The library is opened by name: the linker leaves it out where all its used symbols are defined
// here.
void* Library() {
  static void* const library = ::dlopen("libxxhash.so.0", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    std::fprintf(stderr, "%s\n", ::dlerror());
    std::abort();
  }
  return library;
}
}  // namespace

void SwitchChecksumsOff() { checksums_off = true; }

}  // namespace prefixd::storage::reliability

using prefixd::storage::reliability::checksums_off;
using prefixd::storage::reliability::Library;

extern "C" {

uint64_t XXH3_64bits(const void* data, size_t n) {
  using F = uint64_t(const void*, size_t);
  static F* const next = reinterpret_cast<F*>(::dlsym(Library(), "XXH3_64bits"));
  return checksums_off ? 0 : next(data, n);
}

uint64_t XXH3_64bits_withSeed(const void* data, size_t n, uint64_t seed) {
  using F = uint64_t(const void*, size_t, uint64_t);
  static F* const next = reinterpret_cast<F*>(::dlsym(Library(), "XXH3_64bits_withSeed"));
  return checksums_off ? 0 : next(data, n, seed);
}

}  // extern "C"
