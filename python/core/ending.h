// Owns what ends with a wait: a session sends a message and waits for its answer, a restore joins
// its thread, the last holder of a store of this process waits for its background.
//
// Thread-safety: a plain value.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <utility>

#include "base/opened_here.h"

namespace prefixd::python {

// A smart pointer that gives up what it holds without the interpreter's lock, so that other threads
// go on meanwhile; one of them may be what the end waits for (a progress function). In a child of
// fork() it leaves its copy as it is.
template <typename Pointer>
class Ending {
 public:
  Ending() = default;
  Ending(std::nullptr_t) {}                         // NOLINT: implicit
  Ending(Pointer held) : held_(std::move(held)) {}  // NOLINT: implicit
  Ending(const Ending&) = default;
  Ending(Ending&&) noexcept = default;
  Ending& operator=(Ending other) noexcept {
    std::swap(held_, other.held_);
    std::swap(opened_, other.opened_);
    return *this;
  }
  ~Ending() { reset(); }

  void reset() {
    if (!held_) return;
    Pointer ended = std::move(held_);  // other threads find nothing here any more
    if (!opened_.holds()) {
      static_cast<void>(new Pointer(std::move(ended)));
    } else if (PyGILState_Check() != 0) {
      const nb::gil_scoped_release unlocked;
      ended.reset();
    }
  }

  const Pointer& get() const { return held_; }
  operator const Pointer&() const { return held_; }  // NOLINT: implicit
  auto* operator->() const { return held_.operator->(); }
  auto& operator*() const { return *held_; }
  explicit operator bool() const { return bool(held_); }

 private:
  Pointer held_;
  OpenedHere opened_;
};

}  // namespace prefixd::python
