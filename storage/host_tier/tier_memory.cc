#include "storage/host_tier/tier_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <iterator>
#include <utility>

#include "storage/io/errors.h"

namespace prefixd::storage {
namespace {

constexpr uint64_t kHugePage = 2u << 20, kSmallPage = 4096;
#ifndef MADV_COLLAPSE  // Linux 6.1; Debian 12's C library does not name it yet
#define MADV_COLLAPSE 25
#endif

Error Failed(const std::string& what, int error) {
  const bool short_of =
      error == ENOMEM || error == ENOSPC || error == EMFILE || error == ENFILE || error == EAGAIN;
  return {short_of ? Code::kResourceExhausted : Code::kIo,
          "host tier: " + what + ": " + std::strerror(error)};
}

// Returns the chosen word of "always within_size advise [never] deny force".
std::string TransparentHugePages() {
  std::ifstream in("/sys/kernel/mm/transparent_hugepage/shmem_enabled");
  const std::string text(std::istreambuf_iterator<char>(in), {});
  const size_t open = text.find('['), close = text.find(']');
  if (open == std::string::npos || close == std::string::npos) return "unknown";
  return text.substr(open + 1, close - open - 1);
}

}  // namespace

TierMemory::TierMemory(TierMemory&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)),
      reserved_(std::exchange(other.reserved_, {})),
      fd_(std::move(other.fd_)),
      read_only_(std::move(other.read_only_)),
      hugetlb_(other.hugetlb_),
      collapse_(other.collapse_),
      huge_pages_(std::move(other.huge_pages_)) {}

TierMemory::~TierMemory() {
  if (!reserved_.empty()) ::munmap(reserved_.data(), reserved_.size());
}

// Returns whether small pages of this mapping can be made one huge page, tried on its first ones.
bool TierMemory::CanCollapse() {
#if defined(MADV_POPULATE_WRITE)
  if (size_ < kHugePage || ::madvise(data_, kSmallPage, MADV_POPULATE_WRITE) != 0) return false;
  const bool collapsed = ::madvise(data_, kHugePage, MADV_COLLAPSE) == 0;
  return GiveBack(0, kHugePage).ok() && collapsed;
#else
  return false;
#endif
}

Result<TierMemory> TierMemory::Create(uint64_t bytes, bool hugetlb) {
  TierMemory memory;
  memory.hugetlb_ = hugetlb;
  const unsigned flags = MFD_CLOEXEC | MFD_ALLOW_SEALING | (hugetlb ? MFD_HUGETLB : 0u);
  memory.fd_ = UniqueFd(::memfd_create("prefixd-host-tier", flags));
  const std::string size = std::to_string(bytes) + " bytes";
  if (!memory.fd_.valid() || bytes > static_cast<uint64_t>(INT64_MAX) ||
      ::ftruncate(memory.fd_.get(), static_cast<off_t>(bytes)) != 0) {
    const int error = bytes > static_cast<uint64_t>(INT64_MAX) ? ENOMEM : errno;
    if (hugetlb) return Error{Code::kUnavailable, Failed("no huge pages", error).message};
    return Failed("a region of " + size, error);
  }
  // The mapping begins where huge pages of the file can be huge pages of the mapping too.
  void* const reserved = ::mmap(nullptr, bytes + kHugePage, PROT_NONE,
                                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) return Failed("mapping " + size, errno);
  memory.reserved_ = {static_cast<std::byte*>(reserved), bytes + kHugePage};
  const auto address = reinterpret_cast<uintptr_t>(reserved);
  void* const at =
      ::mmap(reinterpret_cast<void*>((address + kHugePage - 1) & ~(kHugePage - 1)), bytes,
             PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE, memory.fd_.get(), 0);
  if (at == MAP_FAILED) return Failed("mapping " + size, errno);
  memory.data_ = static_cast<std::byte*>(at);
  memory.size_ = bytes;
  if (::fcntl(memory.fd_.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    return Failed("sealing its size", errno);
  }
  const std::string self = "/proc/self/fd/" + std::to_string(memory.fd_.get());
  memory.read_only_ = UniqueFd(::open(self.c_str(), O_RDONLY | O_CLOEXEC));
  if (::fchmod(memory.fd_.get(), 0) != 0) return Failed("closing it to others", errno);

  const std::string thp = TransparentHugePages();
  const bool allowed = thp == "always" || thp == "within_size" || thp == "advise" || thp == "force";
  if (hugetlb) {
    memory.huge_pages_ = "hugetlb";
  } else if (allowed && ::madvise(at, bytes, MADV_HUGEPAGE) == 0) {
    memory.huge_pages_ = "transparent";
  } else if ((memory.collapse_ = memory.CanCollapse())) {
    memory.huge_pages_ = "collapsed";
  } else {
    memory.huge_pages_ = "none (shmem_enabled is " + thp + ")";
  }
  return memory;
}

Status TierMemory::Take(uint64_t offset, uint64_t bytes) {
  // The pool of huge pages may be empty, so fallocate takes them before they are touched. All
  // pages are made at once, which is cheaper than a fault for each; a kernel that cannot makes them
  // when touched.
  if (hugetlb_ &&
      ::fallocate(fd_.get(), 0, static_cast<off_t>(offset), static_cast<off_t>(bytes)) != 0) {
    return Failed("taking " + std::to_string(bytes) + " bytes of huge pages", errno);
  }
  if (!collapse_ || offset % kHugePage != 0) return Populate(offset, bytes);
  uint64_t at = offset;
  for (; at + kHugePage <= offset + bytes; at += kHugePage) PREFIXD_TRY(TakeHugePage(at));
  return Populate(at, offset + bytes - at);
}

// Touches one small page, which the kernel then replaces by a huge one: it clears the missing part
// itself, six times cheaper than 512 small pages made one by one and copied together.
Status TierMemory::TakeHugePage(uint64_t offset) {
  PREFIXD_TRY(Populate(offset, kSmallPage));
  if (::madvise(data_ + offset, kHugePage, MADV_COLLAPSE) == 0) return {};
  return Populate(offset, kHugePage);  // memory is too fragmented
}

Status TierMemory::Populate(uint64_t offset, uint64_t bytes) {
#if defined(MADV_POPULATE_WRITE)
  if (bytes > 0 && ::madvise(data_ + offset, bytes, MADV_POPULATE_WRITE) != 0 && errno != EINVAL) {
    return Failed("taking " + std::to_string(bytes) + " bytes", errno);
  }
#else
  static_cast<void>(offset), static_cast<void>(bytes);
#endif
  return {};
}

Status TierMemory::GiveBack(uint64_t offset, uint64_t bytes) {
  ::munlock(data_ + offset, bytes);  // no effect where nothing was locked
  if (::fallocate(fd_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
                  static_cast<off_t>(bytes)) != 0) {
    return Failed("giving memory back", errno);
  }
  return {};
}

Status TierMemory::Lock(uint64_t offset, uint64_t bytes) {
  if (::mlock(data_ + offset, bytes) != 0) return Failed("locking memory", errno);
  return {};
}

uint64_t TierMemory::resident_bytes() const {
  struct stat st {};
  return ::fstat(fd_.get(), &st) == 0 ? static_cast<uint64_t>(st.st_blocks) * 512 : 0;
}

}  // namespace prefixd::storage
