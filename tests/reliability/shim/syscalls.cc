#include <dlfcn.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <string_view>

#include "tests/reliability/shim/io_hook.h"

namespace prefixd::storage::reliability {
namespace {

constexpr int kMaxFds = 1 << 16;

std::atomic<IoHook*> hook{nullptr};
std::string& Root() {
  static std::string root;
  return root;
}
std::array<std::atomic<bool>, kMaxFds> watched_fd{};

// Returns the definition that this one shadows.
template <typename F>
F* Next(const char* name) {
  return reinterpret_cast<F*>(::dlsym(RTLD_NEXT, name));
}

bool WatchedFd(int fd) {
  return fd >= 0 && fd < kMaxFds && watched_fd[static_cast<size_t>(fd)].load() &&
         hook.load() != nullptr;
}

bool WatchedPath(const char* path) {
  if (hook.load() == nullptr) return false;
  const std::string_view p(path), root(Root());
  return p.starts_with(root) && (p.size() == root.size() || p[root.size()] == '/');
}

long OnPath(Call call, const std::function<long()>& real) { return hook.load()->Run(call, real); }

int Opened(const char* path, int flags, const std::function<long()>& real) {
  const bool watched = WatchedPath(path);
  const long fd = watched ? OnPath({CallKind::kOpen, -1, path, "", flags}, real) : real();
  // The assignment also clears the flag of an earlier descriptor of this number.
  if (fd >= 0 && fd < kMaxFds) watched_fd[static_cast<size_t>(fd)] = watched;
  return static_cast<int>(fd);
}

// Returns where a write() without an offset lands.
uint64_t Position(int fd) {
  if ((::fcntl(fd, F_GETFL) & O_APPEND) != 0) {
    struct stat st {};
    ::fstat(fd, &st);
    return static_cast<uint64_t>(st.st_size);
  }
  return static_cast<uint64_t>(::lseek(fd, 0, SEEK_CUR));
}

long Moved(CallKind kind, int fd, uint64_t offset, std::span<const iovec> iov,
           const std::function<long()>& real, bool at_position = false) {
  return hook.load()->Run({kind, fd, "", "", 0, offset, iov, at_position}, real);
}

long OnFd(CallKind kind, int fd, uint64_t offset, int flags, const std::function<long()>& real) {
  return hook.load()->Run({kind, fd, "", "", flags, offset, {}}, real);
}

// Returns whether a mapping lets writes reach its file past every call.
bool WritesShared(int prot, int flags) {
  return (prot & PROT_WRITE) != 0 && (flags & MAP_TYPE) != MAP_PRIVATE;
}

// Returns whether a call reserves memory beyond the end of a file in memory: megabytes for each of
// RocksDB's logs, never used.
bool ReservesMemory(int fd, int flags) {
  struct statfs st {};
  return (flags & FALLOC_FL_KEEP_SIZE) != 0 && !WatchedFd(fd) && ::fstatfs(fd, &st) == 0 &&
         st.f_type == TMPFS_MAGIC;
}

}  // namespace

void Watch(const std::filesystem::path& root, IoHook* with) {
  Root() = root.string();
  hook = with;
}

int RealOpen(const char* path, int flags, int mode) {
  static const auto next = Next<int(const char*, int, ...)>("open");
  return next(path, flags, mode);
}
ssize_t RealWrite(int fd, const void* data, size_t n) {
  static const auto next = Next<ssize_t(int, const void*, size_t)>("write");
  return next(fd, data, n);
}
int RealClose(int fd) {
  static const auto next = Next<int(int)>("close");
  return next(fd);
}
int RealMkdir(const char* path, int mode) {
  static const auto next = Next<int(const char*, mode_t)>("mkdir");
  return next(path, static_cast<mode_t>(mode));
}

}  // namespace prefixd::storage::reliability

using namespace prefixd::storage::reliability;

// Fetches the mode of a variadic open; callers without O_CREAT pass none.
#define PREFIXD_MODE(flags)                        \
  mode_t mode = 0;                                 \
  if (((flags) & (O_CREAT | O_TMPFILE)) != 0) {    \
    va_list args;                                  \
    va_start(args, flags);                         \
    mode = static_cast<mode_t>(va_arg(args, int)); \
    va_end(args);                                  \
  }

// Each kind of call has one definition: several have two names, since offsets are 64 bits anyway.
// openat is not intercepted: neither librocksdb nor the store opens files that way. O_DIRECT is
// dropped, for the file system below may not take it (the power harness tests alignment).
#define PREFIXD_SYNC(name)                                                                        \
  int name(int fd) {                                                                              \
    static const auto next = Next<int(int)>(#name);                                               \
    if (!WatchedFd(fd)) return next(fd);                                                          \
    return static_cast<int>(OnFd(CallKind::kSync, fd, 0, 0, [&]() -> long { return next(fd); })); \
  }
#define PREFIXD_OPEN(name)                                                    \
  int name(const char* path, int flags, ...) {                                \
    static const auto next = Next<int(const char*, int, ...)>(#name);         \
    PREFIXD_MODE(flags)                                                       \
    return Opened(path, flags, [&]() -> long {                                \
      return next(path, WatchedPath(path) ? flags & ~O_DIRECT : flags, mode); \
    });                                                                       \
  }
#define PREFIXD_PAT(name, kind, buffer)                                        \
  ssize_t name(int fd, buffer data, size_t n, off_t offset) {                  \
    static const auto next = Next<ssize_t(int, buffer, size_t, off_t)>(#name); \
    if (!WatchedFd(fd)) return next(fd, data, n, offset);                      \
    const iovec iov{const_cast<void*>(data), n};                               \
    return Moved(kind, fd, static_cast<uint64_t>(offset), {&iov, 1},           \
                 [&]() -> long { return next(fd, data, n, offset); });         \
  }
#define PREFIXD_PATV(name, kind)                                                             \
  ssize_t name(int fd, const iovec* iov, int count, off_t offset) {                          \
    static const auto next = Next<ssize_t(int, const iovec*, int, off_t)>(#name);            \
    if (!WatchedFd(fd)) return next(fd, iov, count, offset);                                 \
    return Moved(kind, fd, static_cast<uint64_t>(offset), {iov, static_cast<size_t>(count)}, \
                 [&]() -> long { return next(fd, iov, count, offset); });                    \
  }
#define PREFIXD_PATV2(name, kind)                                                            \
  ssize_t name(int fd, const iovec* iov, int count, off_t offset, int flags) {               \
    static const auto next = Next<ssize_t(int, const iovec*, int, off_t, int)>(#name);       \
    if (!WatchedFd(fd)) return next(fd, iov, count, offset, flags);                          \
    return Moved(kind, fd, static_cast<uint64_t>(offset), {iov, static_cast<size_t>(count)}, \
                 [&]() -> long { return next(fd, iov, count, offset, flags); });             \
  }
#define PREFIXD_TRUNCATE(name)                                                            \
  int name(int fd, off_t size) noexcept {                                                 \
    static const auto next = Next<int(int, off_t)>(#name);                                \
    if (!WatchedFd(fd)) return next(fd, size);                                            \
    return static_cast<int>(OnFd(CallKind::kTruncate, fd, static_cast<uint64_t>(size), 0, \
                                 [&]() -> long { return next(fd, size); }));              \
  }
#define PREFIXD_ALLOCATE(name)                                                                  \
  int name(int fd, int flags, off_t offset, off_t n) {                                          \
    static const auto next = Next<int(int, int, off_t, off_t)>(#name);                          \
    if (ReservesMemory(fd, flags)) return 0;                                                    \
    if (!WatchedFd(fd)) return next(fd, flags, offset, n);                                      \
    return static_cast<int>(OnFd(CallKind::kAllocate, fd, static_cast<uint64_t>(offset + n),    \
                                 flags, [&]() -> long { return next(fd, flags, offset, n); })); \
  }

extern "C" {

PREFIXD_OPEN(open)
PREFIXD_OPEN(open64)
PREFIXD_SYNC(fsync)
PREFIXD_SYNC(fdatasync)
PREFIXD_PAT(pwrite, CallKind::kWrite, const void*)
PREFIXD_PAT(pwrite64, CallKind::kWrite, const void*)
PREFIXD_PAT(pread, CallKind::kRead, void*)
PREFIXD_PAT(pread64, CallKind::kRead, void*)
PREFIXD_PATV(pwritev, CallKind::kWrite)
PREFIXD_PATV(pwritev64, CallKind::kWrite)
PREFIXD_PATV(preadv, CallKind::kRead)
PREFIXD_PATV(preadv64, CallKind::kRead)
PREFIXD_PATV2(pwritev2, CallKind::kWrite)
PREFIXD_PATV2(pwritev64v2, CallKind::kWrite)
PREFIXD_PATV2(preadv2, CallKind::kRead)
PREFIXD_PATV2(preadv64v2, CallKind::kRead)
PREFIXD_TRUNCATE(ftruncate)
PREFIXD_TRUNCATE(ftruncate64)
PREFIXD_ALLOCATE(fallocate)
PREFIXD_ALLOCATE(fallocate64)

int creat(const char* path, mode_t mode) {
  return ::open(path, O_CREAT | O_WRONLY | O_TRUNC, mode);
}

int posix_fallocate(int fd, off_t offset, off_t n) {
  static const auto next = Next<int(int, off_t, off_t)>("posix_fallocate");
  if (!WatchedFd(fd)) return next(fd, offset, n);
  return ::fallocate(fd, 0, offset, n) == 0 ? 0 : errno;
}

int sync_file_range(int fd, off_t offset, off_t n, unsigned flags) {
  static const auto next = Next<int(int, off_t, off_t, unsigned)>("sync_file_range");
  if (WatchedFd(fd)) return 0;  // a hint: it promises nothing that survives
  return next(fd, offset, n, flags);
}

ssize_t write(int fd, const void* data, size_t n) {
  if (!WatchedFd(fd)) return RealWrite(fd, data, n);
  const iovec iov{const_cast<void*>(data), n};
  return Moved(
      CallKind::kWrite, fd, Position(fd), {&iov, 1},
      [&]() -> long { return RealWrite(fd, data, n); }, true);
}

ssize_t writev(int fd, const iovec* iov, int count) {
  static const auto next = Next<ssize_t(int, const iovec*, int)>("writev");
  if (!WatchedFd(fd)) return next(fd, iov, count);
  return Moved(
      CallKind::kWrite, fd, Position(fd), {iov, static_cast<size_t>(count)},
      [&]() -> long { return next(fd, iov, count); }, true);
}

ssize_t read(int fd, void* data, size_t n) {
  static const auto next = Next<ssize_t(int, void*, size_t)>("read");
  if (!WatchedFd(fd)) return next(fd, data, n);
  const iovec iov{data, n};
  return Moved(
      CallKind::kRead, fd, 0, {&iov, 1}, [&]() -> long { return next(fd, data, n); }, true);
}

int close(int fd) {
  if (!WatchedFd(fd)) return RealClose(fd);
  return static_cast<int>(OnFd(CallKind::kClose, fd, 0, 0, [&]() -> long {
    watched_fd[static_cast<size_t>(fd)] = false;
    return RealClose(fd);
  }));
}

int fclose(FILE* file) {
  static const auto next = Next<int(FILE*)>("fclose");
  const int fd = ::fileno(file);
  if (!WatchedFd(fd)) return next(file);
  return static_cast<int>(OnFd(CallKind::kClose, fd, 0, 0, [&]() -> long {
    watched_fd[static_cast<size_t>(fd)] = false;
    return next(file);
  }));
}

int rename(const char* from, const char* to) noexcept {
  static const auto next = Next<int(const char*, const char*)>("rename");
  if (!WatchedPath(to)) return next(from, to);
  return static_cast<int>(
      OnPath({CallKind::kRename, -1, from, to}, [&]() -> long { return next(from, to); }));
}

int link(const char* from, const char* to) noexcept {
  static const auto next = Next<int(const char*, const char*)>("link");
  if (!WatchedPath(to)) return next(from, to);
  return static_cast<int>(
      OnPath({CallKind::kLink, -1, from, to}, [&]() -> long { return next(from, to); }));
}

int unlink(const char* path) noexcept {
  static const auto next = Next<int(const char*)>("unlink");
  if (!WatchedPath(path)) return next(path);
  return static_cast<int>(
      OnPath({CallKind::kUnlink, -1, path}, [&]() -> long { return next(path); }));
}

int unlinkat(int dir, const char* path, int flags) noexcept {
  static const auto next = Next<int(int, const char*, int)>("unlinkat");
  if (!WatchedPath(path)) return next(dir, path, flags);
  return (flags & AT_REMOVEDIR) != 0 ? ::rmdir(path) : ::unlink(path);
}

int remove(const char* path) noexcept {
  static const auto next = Next<int(const char*)>("remove");
  if (!WatchedPath(path)) return next(path);
  const int rc = ::unlink(path);
  return rc != 0 && errno == EISDIR ? ::rmdir(path) : rc;
}

int mkdir(const char* path, mode_t mode) noexcept {
  if (!WatchedPath(path)) return RealMkdir(path, static_cast<int>(mode));
  return static_cast<int>(OnPath({CallKind::kMkdir, -1, path}, [&]() -> long {
    return RealMkdir(path, static_cast<int>(mode));
  }));
}

int rmdir(const char* path) noexcept {
  static const auto next = Next<int(const char*)>("rmdir");
  if (!WatchedPath(path)) return next(path);
  return static_cast<int>(
      OnPath({CallKind::kRmdir, -1, path}, [&]() -> long { return next(path); }));
}

// Names of threads only inform people. Setting one leaves entries in /proc whose removal, when the
// process is gone, took a fifth of a cycle.
int pthread_setname_np(pthread_t, const char*) noexcept { return 0; }

void* mmap(void* at, size_t n, int prot, int flags, int fd, off_t offset) noexcept {
  static const auto next = Next<void*(void*, size_t, int, int, int, off_t)>("mmap");
  if (WatchedFd(fd) && WritesShared(prot, flags)) {
    OnFd(CallKind::kSharedMap, fd, 0, 0, []() -> long { return 0; });
  }
  return next(at, n, prot, flags, fd, offset);
}

}  // extern "C"
