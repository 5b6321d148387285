#include "measure/disk/medium.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/statfs.h>
#include <unistd.h>

#include <cerrno>

namespace prefixd::bench {
namespace {

bool LiesInMemory(const std::filesystem::path& dir) {
  struct statfs s {};
  if (::statfs(dir.c_str(), &s) != 0) return false;
  const auto type = static_cast<unsigned long>(s.f_type);
  return type == TMPFS_MAGIC || type == RAMFS_MAGIC;
}

bool RefusesDirect(const std::filesystem::path& dir) {
  const std::filesystem::path file = dir / ".direct";
  const int fd = ::open(file.c_str(), O_CREAT | O_RDWR | O_DIRECT | O_CLOEXEC, 0600);
  const bool refused = fd < 0 && errno == EINVAL;
  if (fd >= 0) ::close(fd);
  ::unlink(file.c_str());  // the kernel makes the file before it refuses the flag
  return refused;
}

}  // namespace

Medium MediumOf(const std::filesystem::path& dir) {
  const bool memory = LiesInMemory(dir);
  if (!memory && !RefusesDirect(dir)) return {};
  return {false, "a file in the page cache",
          "No disk was measured: " +
              std::string(memory ? "the directory lies in memory"
                                 : "the directory's file system refuses O_DIRECT") +
              ", so that rows in files are read from memory; --dir names one on a disk."};
}

}  // namespace prefixd::bench
