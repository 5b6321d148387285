#include "tensors/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace prefixd {
namespace {

Error OsError(const std::filesystem::path& path, const char* what, int error) {
  const Code code = error == ENOENT ? Code::kNotFound : Code::kIo;
  return {code, path.string() + ": cannot " + what + ": " + std::strerror(error)};
}

}  // namespace

Result<MappedFile> MappedFile::Open(const std::filesystem::path& path) {
  // O_NONBLOCK makes a FIFO an error below; without it, open would wait for a writer.
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return OsError(path, "open", errno);
  struct stat info;
  if (::fstat(fd, &info) != 0) {
    const int error = errno;
    ::close(fd);
    return OsError(path, "read its size", error);
  }
  if (!S_ISREG(info.st_mode)) {
    ::close(fd);
    return InvalidArgument(path.string() + ": is not a regular file");
  }
  if (info.st_size == 0) {  // mmap refuses empty ranges
    ::close(fd);
    return MappedFile(nullptr, 0);
  }
  const size_t size = static_cast<size_t>(info.st_size);
  void* data = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, fd, 0);
  const int error = errno;
  ::close(fd);
  if (data == MAP_FAILED) return OsError(path, "map", error);
  return MappedFile(static_cast<const std::byte*>(data), size);
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(const_cast<std::byte*>(data_), size_);
}

}  // namespace prefixd
