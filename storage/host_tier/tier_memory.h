// Holds the memory behind one tenant's part of the host tier: a memfd of fixed size, sparse, mapped
// writable here and readable by every process that receives its read-only descriptor.
//
// F_SEAL_FUTURE_WRITE is not used: under it Linux refuses to punch holes (EPERM), and memory taken
// from a tenant could then never be given back. Instead the only descriptor that ever leaves is
// open for reading alone: the kernel refuses writable mappings of it and writes through it, and
// mode 0 keeps it from being opened again for writing. Root, or the daemon's own user going about
// it on purpose, can undo that, as they could write into the daemon's memory; no process can by
// mistake. The size is sealed, so a mapping never ends in SIGBUS.
//
// Thread-safety: methods may be called concurrently for ranges that do not overlap.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "prefixd/result.h"
#include "storage/io/file.h"

namespace prefixd::storage {

class TierMemory {
 public:
  // Reserves addresses and takes no memory. `hugetlb`: the memory comes from the system's pool of
  // huge pages. kResourceExhausted when there are too few addresses or no descriptor is left;
  // kUnavailable when the system has no huge pages.
  static Result<TierMemory> Create(uint64_t bytes, bool hugetlb);
  TierMemory(TierMemory&& other) noexcept;
  TierMemory& operator=(TierMemory&&) = delete;
  ~TierMemory();

  std::span<std::byte> bytes() const { return {data_, size_}; }
  // Takes memory for a range of whole blocks, so that touching it cannot fail.
  // kResourceExhausted: the system has none (left).
  Status Take(uint64_t offset, uint64_t bytes);
  // Gives the range back; it then reads as zeros, in every process.
  Status GiveBack(uint64_t offset, uint64_t bytes);
  // Keeps a taken range from being swapped out. kResourceExhausted: RLIMIT_MEMLOCK.
  Status Lock(uint64_t offset, uint64_t bytes);

  // Returns the descriptor to pass on; -1 when /proc is not mounted, so that none could be made.
  int read_only_fd() const { return read_only_.get(); }
  // Returns the bytes of memory taken now, as the kernel counts them.
  uint64_t resident_bytes() const;
  // Returns "hugetlb", "transparent", "collapsed" (small pages put together one by one, where the
  // system does not give large ones by itself), or "none (shmem_enabled is deny)".
  const std::string& huge_pages() const { return huge_pages_; }

 private:
  TierMemory() = default;
  bool CanCollapse();
  Status TakeHugePage(uint64_t offset);
  Status Populate(uint64_t offset, uint64_t bytes);

  std::byte* data_ = nullptr;  // begins at a huge page
  uint64_t size_ = 0;
  std::span<std::byte> reserved_;  // addresses that data_ lies in
  UniqueFd fd_, read_only_;
  bool hugetlb_ = false, collapse_ = false;
  std::string huge_pages_;
};

}  // namespace prefixd::storage
