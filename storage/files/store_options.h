// Declares the options of a store: where it lies, and its limits.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/memory_budget.h"
#include "prefixd/options.h"
#include "storage/crypt/cipher.h"
#include "storage/io/io_engine.h"
#include "storage/segment/unix_time.h"

namespace prefixd::storage {

// Says what happens to a put that does not fit: it is refused, or the prefixes with the lowest
// score (eviction.h) make room for it.
enum class Eviction : uint8_t { kNever, kByScore };

struct StoreOptions {
  std::filesystem::path dir;              // created if missing (its parent must exist)
  IoBackend io = IoBackend::kAuto;        // io_uring when a probing read works, else threads
  uint64_t host_tier_bytes = 1ull << 30;  // bound of the verified-page cache (host_tier.h)
  // Fractions of it for tenants by name; the other tenants have equal parts of the rest.
  std::vector<std::pair<std::string, double>> host_tier_shares;
  // Memory from the system's pool of huge pages, where there is one.
  bool host_tier_hugetlb = false;
  bool host_tier_mlock = false;  // never swapped out
  // Called for every block of the tier's memory before its first use and after its last; must be
  // quick.
  std::function<void(std::span<std::byte> block, bool taken)> on_host_block;
  // What the store takes its memory from; null: nothing is counted, and nothing refused.
  std::shared_ptr<MemoryBudget> memory;
  uint64_t tables_bytes = 256ull << 20;  // bound of what idle open segments keep in memory
  uint64_t max_open_files = 0;           // segment files; 0: by the process's limit (open_files.h)
  // Free-space watermark: no put goes below it. kByDisk: MinFreeOf the disk (min_free.h), as it is
  // when the store is opened.
  uint64_t min_free_bytes = kByDisk;
  uint64_t ballast_bytes = 16ull << 20;  // released on a full disk (ballast.h); 0: none
  uint64_t quota_bytes = 0;              // physical bytes of all segments and blobs; 0: none
  uint64_t tenant_quota_bytes = 0;       // the same for each tenant, 0: none ...
  std::map<std::string, uint64_t> tenant_quotas;  // ... except these
  Eviction eviction = Eviction::kByScore;
  // The clock by which uses grow old (Unix time in milliseconds), for a day of requests that is
  // replayed in minutes. Null: the system's.
  std::function<int64_t()> clock;
  int64_t Now() const { return clock ? clock() : NowUnixMs(); }  // by that clock
  uint64_t max_inflight_bytes = 16ull << 20;
  uint32_t max_inflight_ops = 64;
  // Pages this close that single rows need are read with one operation, and the pages between are
  // discarded. An operation costs a disk more than a few pages do (storage_bench --only gap1 gap2
  // gap4). At most 16.
  uint32_t max_gap_pages = 2;
  // Row reads (not the scrub's) that the disk has not answered in this time fail with kUnavailable;
  // 0: no deadline. It holds per batch: a long read may take longer as long as it moves.
  uint32_t read_deadline_ms = 30'000;
  uint32_t block_tokens = 16;  // granularity of prefix matching's hashes
  // The store's master keys (crypt/key_ring.h); empty: nothing is encrypted.
  std::filesystem::path encryption_key_file;
  CipherKind cipher = CipherKind::kNone;  // of new files; none: the fastest on this CPU

  MemoryAccount MemoryOf(std::string_view tenant) const {
    return memory ? memory->Of(tenant) : MemoryAccount();
  }
  MemoryAccount SharedMemory() const { return memory ? memory->Shared() : MemoryAccount(); }
};

}  // namespace prefixd::storage
