// Captures exceptions of a piece of work as errors: the standard library's containers throw when
// memory runs out, and that must neither end a thread of the store nor leave other threads waiting
// for it.
//
// Thread-safety: a free function.
#pragma once

#include <exception>
#include <new>
#include <string>
#include <utility>

#include "prefixd/result.h"

namespace prefixd {

// Returns the status of `work`; kResourceExhausted for std::bad_alloc, kInternal for other
// exceptions. Does not throw itself: its messages for want of memory fit into a string's own bytes.
template <typename Work>
Status CaptureErrors(Work&& work) {
  try {
    return std::forward<Work>(work)();
  } catch (const std::bad_alloc&) {
    return Error{Code::kResourceExhausted, "out of memory"};
  } catch (const std::exception& e) {
    try {
      return Error{Code::kInternal, std::string("unexpected: ") + e.what()};
    } catch (const std::bad_alloc&) {
      return Error{Code::kInternal, "unexpected"};
    }
  }
}

}  // namespace prefixd
