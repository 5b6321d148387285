// Charges a step's stages to its ledger. Internal to runtime/.
#pragma once

#include <chrono>
#include <cstdint>

#include "prefixd/ledger.h"
#include "storage/store/prefix_store.h"

namespace prefixd {

inline void ChargeReads(const storage::ReadStats& reads, Ledger& ledger) {
  for (size_t tier = 0; tier < kTierCount; ++tier) {
    ledger.physical_bytes[tier] += reads.bytes[tier];
  }
  ledger.prefetch_used_bytes += reads.prefetch_used_bytes;
}

// Returns the i-th of n shares in a cost that was spent once for all; the shares add up to it.
inline uint64_t ShareOf(uint64_t spent, size_t n, size_t i) { return (spent + n - 1 - i) / n; }
inline storage::ReadStats ShareOf(const storage::ReadStats& reads, size_t n, size_t i) {
  storage::ReadStats share;
  for (size_t tier = 0; tier < kTierCount; ++tier) {
    share.bytes[tier] = ShareOf(reads.bytes[tier], n, i);
  }
  share.pages_ssd = ShareOf(reads.pages_ssd, n, i);
  share.pages_host = ShareOf(reads.pages_host, n, i);
  share.prefetch_used_bytes = ShareOf(reads.prefetch_used_bytes, n, i);
  return share;
}

// Adds its own lifetime to one of the ledger's stages.
class StageTimer {
 public:
  explicit StageTimer(uint64_t& ns) : ns_(ns) {}
  ~StageTimer() {
    ns_ += static_cast<uint64_t>(
        std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - begun_).count());
  }
  StageTimer(const StageTimer&) = delete;
  StageTimer& operator=(const StageTimer&) = delete;

 private:
  using Clock = std::chrono::steady_clock;
  uint64_t& ns_;
  const Clock::time_point begun_ = Clock::now();
};

// Charges reads to the ledger, also when the step fails afterwards.
class ReadCharge {
 public:
  explicit ReadCharge(Ledger& ledger) : ledger_(ledger) {}
  ~ReadCharge() { ChargeReads(reads, ledger_); }
  ReadCharge(const ReadCharge&) = delete;
  ReadCharge& operator=(const ReadCharge&) = delete;

  storage::ReadStats reads;

 private:
  Ledger& ledger_;
};

}  // namespace prefixd
