#include "base/check.h"

#include <cstdio>
#include <cstdlib>

namespace prefixd {

void CheckFailed(const char* file, int line, const char* expression, const char* names,
                 std::string_view values) {
  std::fprintf(stderr, "%s:%d: broken invariant: %s", file, line, expression);
  if (!values.empty()) {
    std::fprintf(stderr, " (%s = %.*s)", names, static_cast<int>(values.size()), values.data());
  }
  std::fputc('\n', stderr);
  std::abort();
}

}  // namespace prefixd
