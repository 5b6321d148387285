#include "storage/io/file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <new>
#include <string>

#include "storage/io/errors.h"

namespace prefixd::storage {

constexpr size_t kHugePageBytes = 2u << 20;

UniqueFd& UniqueFd::operator=(UniqueFd&& other) noexcept {
  if (this != &other) {
    Close();
    fd_ = std::exchange(other.fd_, -1);
  }
  return *this;
}

void UniqueFd::Close() {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

Result<UniqueFd> OpenFile(const std::filesystem::path& path, int flags, int mode) {
  // Who has put a link there wants another file read or written.
  if ((flags & O_DIRECTORY) == 0) flags |= O_NOFOLLOW;
  int fd = -1;
  do {
    fd = ::open(path.c_str(), flags | O_CLOEXEC, mode);
  } while (fd < 0 && errno == EINTR);
  if (fd < 0 && errno == ELOOP) {
    return Error{Code::kIo, path.string() +
                                " is a symbolic link, and none is followed in a store's directory: "
                                "put the file itself there"};
  }
  if (fd < 0) {
    Error error = ErrnoError(errno, "cannot open " + path.string());
    if (errno == ENOENT) error.code = Code::kNotFound;
    return error;
  }
  return UniqueFd(fd);
}

Status SyncDirectory(const std::filesystem::path& dir) {
  PREFIXD_ASSIGN(UniqueFd fd, OpenFile(dir, O_RDONLY | O_DIRECTORY));
  if (::fsync(fd.get()) != 0) return ErrnoError(errno, "cannot sync directory " + dir.string());
  return {};
}

Status RemoveFile(const std::filesystem::path& path) {
  if (::unlink(path.c_str()) != 0 && errno != ENOENT) {
    return ErrnoError(errno, "cannot remove " + path.string());
  }
  return {};
}

Status CheckWritable(const std::filesystem::path& path) {
  struct statvfs fs {};
  if (::statvfs(path.c_str(), &fs) != 0 || (fs.f_flag & ST_RDONLY) == 0) return {};
  return Error{Code::kIo, "the file system of " + path.string() +
                              " is read-only: nothing can be stored or removed until it can be "
                              "written again. What is stored is served"};
}

Result<uint64_t> DiskBytes(const std::filesystem::path& path) {
  struct statvfs fs {};
  if (::statvfs(path.c_str(), &fs) != 0) {
    return ErrnoError(errno, "cannot ask for the size of the disk of " + path.string());
  }
  return uint64_t{fs.f_blocks} * uint64_t{fs.f_frsize};
}

Result<uint64_t> FreeBytes(const std::filesystem::path& path) {
  struct statvfs fs {};
  if (::statvfs(path.c_str(), &fs) != 0) {
    return ErrnoError(errno, "cannot ask for the free space of " + path.string());
  }
  return uint64_t{fs.f_bavail} * uint64_t{fs.f_frsize};
}

Result<bool> Preallocate(int fd, uint64_t bytes, const std::filesystem::path& path) {
  int rc = 0;
  do {
    rc = ::fallocate(fd, 0, 0, static_cast<off_t>(bytes));
  } while (rc != 0 && errno == EINTR);
  if (rc == 0) return true;
  if (errno != EOPNOTSUPP) {
    return ErrnoError(errno,
                      "cannot allocate " + std::to_string(bytes) + " bytes for " + path.string());
  }
  // The file system cannot reserve; a full disk then shows as a failed write.
  if (::ftruncate(fd, static_cast<off_t>(bytes)) != 0) {
    return ErrnoError(errno, "cannot size " + path.string());
  }
  return false;
}

Result<uint64_t> FileBytes(int fd, const std::filesystem::path& path) {
  struct stat st {};
  if (::fstat(fd, &st) != 0) return ErrnoError(errno, "cannot stat " + path.string());
  return static_cast<uint64_t>(st.st_size);
}

namespace {

size_t UnitOf(size_t bytes) { return bytes >= kHugePageBytes ? kHugePageBytes : 4096; }

}  // namespace

size_t AlignedBuffer::Footprint(size_t bytes) {
  const size_t unit = UnitOf(bytes);
  return std::max(unit, (bytes + unit - 1) / unit * unit);
}

AlignedBuffer::AlignedBuffer(size_t bytes) : size_(bytes) {
  // Huge pages are used where they fit: the kernel pins one instead of 512 for every direct read or
  // write.
  const size_t unit = UnitOf(bytes), rounded = Footprint(bytes);
  data_.reset(static_cast<std::byte*>(std::aligned_alloc(unit, rounded)));
  if (!data_) throw std::bad_alloc();
  if (unit == kHugePageBytes) ::madvise(data_.get(), rounded, MADV_HUGEPAGE);  // advisory
}

void AlignedBuffer::Free::operator()(std::byte* p) const { std::free(p); }

}  // namespace prefixd::storage
