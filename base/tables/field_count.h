// Counts the members of a plain struct, so that the compiler can check that a table of them is
// complete.
#pragma once

#include <cstddef>

namespace prefixd {

struct AnyField {
  template <typename T>
  operator T() const;  // NOLINT: converts to a member of any type; never called
};

template <typename S, typename... Fields>
consteval size_t FieldCount() {
  if constexpr (requires { S{Fields{}..., AnyField{}}; }) {
    return FieldCount<S, Fields..., AnyField>();
  } else {
    return sizeof...(Fields);
  }
}

}  // namespace prefixd
