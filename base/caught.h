// What a piece of work throws, as an error: memory runs out in the standard library's containers,
// and no thread of the store may end by it, nor leave others waiting for it.
//
// Thread-safety: a free function.
#pragma once

#include <exception>
#include <new>
#include <string>
#include <utility>

#include "prefixd/result.h"

namespace prefixd {

// What `work` returns; kResourceExhausted for std::bad_alloc, kInternal for other exceptions.
template <typename Work>
Status Caught(Work&& work) {
  try {
    return std::forward<Work>(work)();
  } catch (const std::bad_alloc&) {
    return Error{Code::kResourceExhausted, "out of memory"};
  } catch (const std::exception& e) {
    return Error{Code::kInternal, std::string("unexpected: ") + e.what()};
  }
}

}  // namespace prefixd
