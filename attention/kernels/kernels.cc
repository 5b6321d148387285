#include "attention/kernels/kernels.h"

#include <atomic>
#include <initializer_list>
#if defined(PREFIXD_X86_KERNELS)
#include <cpuid.h>
#endif

namespace prefixd {

extern const KernelTable kGenericKernels;
#if defined(PREFIXD_X86_KERNELS)
extern const KernelTable kAvx2Kernels;
extern const KernelTable kAvx512Kernels;
#endif

#if defined(PREFIXD_X86_KERNELS)
namespace {

// Clang 16's __builtin_cpu_supports does not know "f16c".
bool HalvesConvert() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}

}  // namespace
#endif

const KernelTable* KernelsFor(Isa isa) {
  if (isa == Isa::kGeneric) return &kGenericKernels;
#if defined(PREFIXD_X86_KERNELS)
  __builtin_cpu_init();
  const bool avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && HalvesConvert();
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl");
  if (isa == Isa::kAvx2 && avx2) return &kAvx2Kernels;
  if (isa == Isa::kAvx512 && avx512) return &kAvx512Kernels;
#endif
  return nullptr;
}

namespace {

const KernelTable* Widest() {
  for (Isa isa : {Isa::kAvx512, Isa::kAvx2}) {
    if (const KernelTable* table = KernelsFor(isa)) return table;
  }
  return &kGenericKernels;
}

std::atomic<const KernelTable*>& Chosen() {
  static std::atomic<const KernelTable*> chosen{Widest()};
  return chosen;
}

}  // namespace

const KernelTable& Kernels() { return *Chosen().load(std::memory_order_relaxed); }

ScopedKernels::ScopedKernels(const KernelTable& table) : before_(Chosen().exchange(&table)) {}
ScopedKernels::~ScopedKernels() { Chosen() = before_; }

}  // namespace prefixd
