#include "index/codes/code_scan.h"

#include <initializer_list>

namespace prefixd {

extern const CodeScanTable kGenericCodeScan;
#if defined(PREFIXD_X86_KERNELS)
extern const CodeScanTable kAvx2CodeScan;
extern const CodeScanTable kAvx512VnniCodeScan;
#endif

const CodeScanTable* CodeScanFor(CodeScanIsa isa) {
  if (isa == CodeScanIsa::kGeneric) return &kGenericCodeScan;
#if defined(PREFIXD_X86_KERNELS)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool vnni = avx2 && __builtin_cpu_supports("avx512f") &&
                    __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                    __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
  if (isa == CodeScanIsa::kAvx2 && avx2) return &kAvx2CodeScan;
  if (isa == CodeScanIsa::kAvx512Vnni && vnni) return &kAvx512VnniCodeScan;
#endif
  return nullptr;
}

const CodeScanTable& CodeScan() {
  static const CodeScanTable& chosen = []() -> const CodeScanTable& {
    for (CodeScanIsa isa : {CodeScanIsa::kAvx512Vnni, CodeScanIsa::kAvx2}) {
      if (const CodeScanTable* table = CodeScanFor(isa)) return *table;
    }
    return kGenericCodeScan;
  }();
  return chosen;
}

}  // namespace prefixd
