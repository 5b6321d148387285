// Lets a test see and answer system calls on files. The functions of libc that the store and
// librocksdb use are defined anew in the test executable (syscalls.cc) and call the next definition
// in line; those that concern a file below the watched directory go through the hook first.
// io_uring bypasses libc, so a store under a hook is opened with the threads backend.
//
// Thread-safety: Watch before the threads that are to be watched start. Run may be called from any
// thread.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <string>

namespace prefixd::storage::reliability {

enum class CallKind : uint8_t {
  kOpen,  // its result is a descriptor, whose calls come with `fd`
  kClose,
  kRead,
  kWrite,
  kTruncate,
  kAllocate,
  kSync,  // fsync and fdatasync of files, fsync of directories
  kRename,
  kLink,
  kUnlink,
  kMkdir,
  kRmdir,
  kSharedMap,  // a writable shared mapping: its writes bypass every call
};

struct Call {
  CallKind kind;
  int fd = -1;                 // for calls on descriptors
  std::string path, to;        // for calls on names, absolute; `to` for rename and link
  int flags = 0;               // open: O_...; allocate: FALLOC_FL_...
  uint64_t offset = 0;         // write: where; truncate: the new size; allocate: the end
  std::span<const iovec> iov;  // write and read: the caller's memory
  bool at_position = false;    // true for write and read that move the file's position
};

class IoHook {
 public:
  virtual ~IoHook() = default;
  // Answers the call: the return value, with errno set where it is -1. `real` carries it out.
  virtual long Run(const Call& call, const std::function<long()>& real) = 0;
};

// Sends calls on names below `root` (absolute) to `hook`, which must live until the process ends.
void Watch(const std::filesystem::path& root, IoHook* hook);

// Bypasses the hook.
int RealOpen(const char* path, int flags, int mode);
ssize_t RealWrite(int fd, const void* data, size_t n);
int RealClose(int fd);
int RealMkdir(const char* path, int mode);

}  // namespace prefixd::storage::reliability
