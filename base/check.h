// Invariants that are checked in every build, release included: where one is broken, going on would
// give wrong results or lose data, so the process says which one and ends; what is committed is
// safe. They guard this project's own bookkeeping. What comes from outside (files, sockets,
// callers) is an Error, never a check. Not for inner loops: one check for a run, a page or a call.
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

// PREFIXD_CHECK(pins > 0) or, with values to be printed, PREFIXD_CHECK(page < n, page, n).
#define PREFIXD_CHECK(condition, ...)                                         \
  do {                                                                        \
    if (!(condition)) [[unlikely]] {                                          \
      ::prefixd::CheckFailed(__FILE__, __LINE__, #condition, "" #__VA_ARGS__, \
                             ::prefixd::CheckedValues(__VA_ARGS__));          \
    }                                                                         \
  } while (false)
