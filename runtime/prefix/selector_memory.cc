#include "runtime/prefix/selector_memory.h"

namespace prefixd {

Result<SelectorMemory::Lease> SelectorMemory::Charge(const MemoryAccount& account, uint64_t bytes) {
  PREFIXD_ASSIGN(MemoryCharge memory, account.Take(MemoryKind::kIndexes, bytes));
  used_ += bytes;
  Trim();
  return Lease(this, bytes, std::move(memory));
}

SelectorMemory::Lease SelectorMemory::TryTake(const MemoryAccount& account, uint64_t bytes) {
  if (bytes > capacity_) return {};
  auto memory = account.TryTake(MemoryKind::kKeys, bytes);
  if (!memory) return {};
  uint64_t used = used_;
  while (used > capacity_ - bytes || !used_.compare_exchange_weak(used, used + bytes)) {
    if (used > capacity_ - bytes && !(release_ && release_())) return {};
    used = used_;
  }
  return {this, bytes, *std::move(memory)};
}

bool SelectorMemory::MakeRoom(uint64_t bytes) {
  if (bytes > capacity_) return false;
  while (used_ > capacity_ - bytes) {
    if (!release_ || !release_()) return false;
  }
  return true;
}

}  // namespace prefixd
