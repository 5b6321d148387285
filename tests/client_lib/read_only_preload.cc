// Preloaded into a daemon: while the file $PREFIXD_READ_ONLY_FLAG exists, everything below
// $PREFIXD_READ_ONLY_DIR behaves as on a file system that the kernel has made read-only: files that
// are open for writing stay open, and writes fail with EROFS.
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/statvfs.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

template <typename F>
F* Next(const char* name) {
  return reinterpret_cast<F*>(::dlsym(RTLD_NEXT, name));
}

bool On() {
  static const char* const flag = std::getenv("PREFIXD_READ_ONLY_FLAG");
  return flag != nullptr && ::access(flag, F_OK) == 0;
}

bool Inside(const char* path) {
  static const char* const dir = std::getenv("PREFIXD_READ_ONLY_DIR");
  return dir != nullptr && path != nullptr && std::strncmp(path, dir, std::strlen(dir)) == 0;
}

bool Refused(const char* path) {
  if (!On() || !Inside(path)) return false;
  errno = EROFS;
  return true;
}

bool Refused(int fd) {
  if (!On()) return false;
  char link[64], path[PATH_MAX];
  std::snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
  const ssize_t n = ::readlink(link, path, sizeof(path) - 1);
  if (n <= 0) return false;
  path[n] = '\0';
  return Refused(path);
}

bool Writes(int flags) { return (flags & (O_WRONLY | O_RDWR | O_CREAT | O_TRUNC)) != 0; }

int Mode(int flags, va_list args) {
  return (flags & (O_CREAT | O_TMPFILE)) != 0 ? va_arg(args, int) : 0;
}

}  // namespace

#define PREFIXD_OPEN(name)                                   \
  int name(const char* path, int flags, ...) {               \
    va_list args;                                            \
    va_start(args, flags);                                   \
    const int mode = Mode(flags, args);                      \
    va_end(args);                                            \
    if (Writes(flags) && Refused(path)) return -1;           \
    static auto* const next = Next<decltype(::name)>(#name); \
    return next(path, flags, mode);                          \
  }
#define PREFIXD_REFUSE(type, name, parameters, arguments, what) \
  type name parameters {                                        \
    if (Refused(what)) return -1;                               \
    static auto* const next = Next<type parameters>(#name);     \
    return next arguments;                                      \
  }
#define PREFIXD_STATVFS(name, type)                          \
  int name(const char* path, type* out) {                    \
    static auto* const next = Next<decltype(::name)>(#name); \
    const int rc = next(path, out);                          \
    if (rc == 0 && On() && Inside(path)) {                   \
      out->f_flag |= ST_RDONLY;                              \
    }                                                        \
    return rc;                                               \
  }

extern "C" {
PREFIXD_OPEN(open)
PREFIXD_OPEN(open64)
PREFIXD_REFUSE(ssize_t, write, (int fd, const void* from, size_t n), (fd, from, n), fd)
PREFIXD_REFUSE(ssize_t, pwrite, (int fd, const void* from, size_t n, off_t at), (fd, from, n, at),
               fd)
PREFIXD_REFUSE(ssize_t, pwrite64, (int fd, const void* from, size_t n, off64_t at),
               (fd, from, n, at), fd)
PREFIXD_REFUSE(ssize_t, pwritev, (int fd, const iovec* from, int n, off_t at), (fd, from, n, at),
               fd)
PREFIXD_REFUSE(ssize_t, pwritev64, (int fd, const iovec* from, int n, off64_t at),
               (fd, from, n, at), fd)
PREFIXD_REFUSE(int, fallocate, (int fd, int mode, off_t at, off_t n), (fd, mode, at, n), fd)
PREFIXD_REFUSE(int, fallocate64, (int fd, int mode, off64_t at, off64_t n), (fd, mode, at, n), fd)
PREFIXD_REFUSE(int, ftruncate, (int fd, off_t n), (fd, n), fd)
PREFIXD_REFUSE(int, ftruncate64, (int fd, off64_t n), (fd, n), fd)
PREFIXD_REFUSE(int, unlink, (const char* path), (path), path)
PREFIXD_REFUSE(int, mkdir, (const char* path, mode_t mode), (path, mode), path)
PREFIXD_REFUSE(int, rename, (const char* from, const char* to), (from, to), to)
PREFIXD_REFUSE(int, link, (const char* from, const char* to), (from, to), to)
PREFIXD_STATVFS(statvfs, struct statvfs)
PREFIXD_STATVFS(statvfs64, struct statvfs64)
}
