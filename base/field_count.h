// How many members a plain struct has, so that the compiler sees that a table of them is complete.
#pragma once

#include <cstddef>

namespace prefixd {

struct AnyField {
  template <typename T>
  operator T() const;  // NOLINT: becomes whatever the member is; never called
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
