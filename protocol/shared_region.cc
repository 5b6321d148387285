#include "protocol/shared_region.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

namespace prefixd {
namespace {

Error Errno(const char* what) {
  const Code code =
      errno == ENOMEM || errno == EMFILE || errno == ENFILE ? Code::kResourceExhausted : Code::kIo;
  return {code, std::string("shared memory: ") + what + ": " + std::strerror(errno)};
}

constexpr uintptr_t kHugePage = 2u << 20;

// Returns where a mapping of so many bytes may begin at a multiple of a huge page, so that huge
// pages of its file are mapped as such: one fault and one entry of the TLB for each. Null:
// anywhere.
void* HugePagePlace(uint64_t bytes) {
  if (bytes < kHugePage) return nullptr;
  void* const all = ::mmap(nullptr, bytes + kHugePage, PROT_NONE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (all == MAP_FAILED) return nullptr;
  const auto address = reinterpret_cast<uintptr_t>(all);
  ::munmap(all, bytes + kHugePage);
  return reinterpret_cast<void*>((address + kHugePage - 1) & ~(kHugePage - 1));
}

}  // namespace

SharedRegion::~SharedRegion() {
  if (data_ != nullptr) ::munmap(data_, size_);
  CloseFd();
}

SharedRegion::SharedRegion(SharedRegion&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)),
      fd_(std::exchange(other.fd_, -1)) {}

SharedRegion& SharedRegion::operator=(SharedRegion&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  std::swap(fd_, other.fd_);
  return *this;
}

void SharedRegion::CloseFd() {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

Result<SharedRegion> SharedRegion::Create(uint64_t bytes) {
  SharedRegion region;
  region.fd_ = ::memfd_create("prefixd", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (region.fd_ < 0) return Errno("memfd_create");
  if (::ftruncate(region.fd_, static_cast<off_t>(bytes)) != 0) return Errno("ftruncate");
  if (::fcntl(region.fd_, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    return Errno("sealing");
  }
  void* at = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, region.fd_, 0);
  if (at == MAP_FAILED) return Errno("mmap");
  region.data_ = static_cast<std::byte*>(at);
  region.size_ = bytes;
  return region;
}

Result<SharedRegion> SharedRegion::Map(int fd, uint64_t bytes) {
  return MapWith(fd, bytes, PROT_READ | PROT_WRITE);
}

Result<SharedRegion> SharedRegion::MapReadOnly(int fd, uint64_t bytes) {
  return MapWith(fd, bytes, PROT_READ);
}

Result<SharedRegion> SharedRegion::MapWith(int fd, uint64_t bytes, int protection) {
  SharedRegion region;
  region.fd_ = fd;
  struct stat st {};
  if (::fstat(fd, &st) != 0) return Errno("fstat");
  const int seals = ::fcntl(fd, F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0) {
    return InvalidArgument("the daemon's shared memory is not sealed against shrinking");
  }
  if (bytes == 0 || static_cast<uint64_t>(st.st_size) < bytes) {
    return InvalidArgument("the daemon's shared memory is shorter than it says");
  }
  // The place is a wish: whoever maps there meanwhile keeps it, and this goes elsewhere.
  void* at = ::mmap(HugePagePlace(bytes), bytes, protection, MAP_SHARED, fd, 0);
  if (at == MAP_FAILED) return Errno("mmap");
  region.data_ = static_cast<std::byte*>(at);
  region.size_ = bytes;
  return region;
}

}  // namespace prefixd
