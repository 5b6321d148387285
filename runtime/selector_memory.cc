#include "runtime/selector_memory.h"

namespace prefixd {

SelectorMemory::Lease SelectorMemory::Charge(uint64_t bytes) {
  used_ += bytes;
  return {this, bytes};
}

SelectorMemory::Lease SelectorMemory::TryTake(uint64_t bytes) {
  uint64_t used = used_;
  do {
    if (bytes > capacity_ || used > capacity_ - bytes) return {};
  } while (!used_.compare_exchange_weak(used, used + bytes));
  return {this, bytes};
}

}  // namespace prefixd
