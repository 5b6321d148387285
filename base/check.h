// Checks invariants in every build, release included. A broken one would lead to wrong results or
// lost data, so the process prints it and aborts; committed data are safe. Checks guard this
// project's own bookkeeping: bad input (files, sockets, callers) is an Error, never a check. Inner
// loops hold no checks; one for a run, a page or a call is enough.
#pragma once

#include <string>
#include <string_view>
#include <type_traits>

namespace prefixd {

// Writes "FILE:LINE: broken invariant: EXPRESSION (NAMES = VALUES)" to stderr and aborts.
[[noreturn, gnu::cold]] void CheckFailed(const char* file, int line, const char* expression,
                                         const char* names, std::string_view values);

template <typename... Values>
[[gnu::cold, gnu::noinline]] std::string CheckedValues(const Values&... values) {
  static_assert((std::is_integral_v<Values> && ...), "whole numbers only: what can be read");
  std::string text;
  ((text += (text.empty() ? "" : ", ") + std::to_string(values)), ...);
  return text;
}

}  // namespace prefixd

// PREFIXD_CHECK(pins > 0) or, to print values too, PREFIXD_CHECK(page < n, page, n).
#define PREFIXD_CHECK(condition, ...)                                              \
  do {                                                                             \
    if (!(condition)) [[unlikely]] {                                               \
      ::prefixd::CheckFailed(__FILE_NAME__, __LINE__, #condition, "" #__VA_ARGS__, \
                             ::prefixd::CheckedValues(__VA_ARGS__));               \
    }                                                                              \
  } while (false)
