#include "measure/disk/page_cache.h"

#include <fcntl.h>
#include <unistd.h>

#include <system_error>

namespace prefixd::bench {

void DropPageCache(const std::filesystem::path& dir) {
  std::error_code ignored;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(dir, ignored)) {
    if (!entry.is_regular_file(ignored)) continue;
    const int fd = ::open(entry.path().c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0) continue;
    // The kernel keeps pages that wait to be written.
    (void)::sync_file_range(
        fd, 0, 0, SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER);
    (void)::posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    ::close(fd);
  }
}

}  // namespace prefixd::bench
