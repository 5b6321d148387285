#include "base/build_info.h"

#include "commit.h"  // made by cmake/PrefixdCommit.cmake
#include "prefixd/version.h"

namespace prefixd {

std::string_view BuildCommit() { return PREFIXD_COMMIT; }

std::string VersionText(std::string_view program, std::string_view more) {
  std::string text(program);
  text += " " PREFIXD_VERSION "\ncommit: " PREFIXD_COMMIT "\nbuild: " PREFIXD_BUILD "\n";
  text += more;
  while (!text.empty() && text.back() == '\n') text.pop_back();
  return text;
}

std::string_view CpuLevel() {
#if defined(__x86_64__)
  // Levels are told apart by their features, because clang 16 has no test for a level by name.
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    return "x86-64-v4";
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return "x86-64-v3";
  if (__builtin_cpu_supports("sse4.2")) return "x86-64-v2";
  return "x86-64";
#else
  return "not x86-64";
#endif
}

}  // namespace prefixd
