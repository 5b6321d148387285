#include "runtime/prefix/selector_memory.h"

namespace prefixd {

SelectorMemory::Lease SelectorMemory::Charge(uint64_t bytes) {
  used_ += bytes;
  Trim();
  return {this, bytes};
}

SelectorMemory::Lease SelectorMemory::TryTake(uint64_t bytes) {
  if (bytes > capacity_) return {};
  uint64_t used = used_;
  while (used > capacity_ - bytes || !used_.compare_exchange_weak(used, used + bytes)) {
    if (used > capacity_ - bytes && !(release_ && release_())) return {};
    used = used_;
  }
  return {this, bytes};
}

}  // namespace prefixd
