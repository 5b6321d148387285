// Tells the process that opened something from a child that fork() has made of it. The child has a
// copy of every object, but not of the threads that serve it, and shares sockets and memory with
// its parent: two processes that go on with one connection take each other's answers.
//
// Thread-safety: a plain value; costs a load.
#pragma once

#include <cstdint>

#include "prefixd/result.h"

namespace prefixd {

class OpenedHere {
 public:
  OpenedHere() : generation_(Generation()) {}
  // Whether this process made the object. Where it did not, the destructor of what has threads or
  // speaks over a connection must not run: it would wait for ever, or speak for the parent.
  bool holds() const { return generation_ == Generation(); }
  // kFailedPrecondition in a child.
  Status Check() const { return holds() ? Status() : Forked(); }

 private:
  static uint64_t Generation();
  static Error Forked();

  uint64_t generation_;
};

}  // namespace prefixd
