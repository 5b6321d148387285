// A folder of a run's own, whose locks tell other runs whether it is still in use.
//
// Thread-safety: one thread at a time.
#pragma once

#include <filesystem>
#include <utility>

#include "prefixd/result.h"

namespace prefixd::bench {

// The descriptor of a file with a flock(2); closing it, or the end of all processes that have it,
// releases the lock.
class FileLock {
 public:
  explicit FileLock(int fd) : fd_(fd) {}
  FileLock(FileLock&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  FileLock& operator=(FileLock&&) = delete;
  ~FileLock() { Close(); }

  bool held() const { return fd_ >= 0; }
  int fd() const { return fd_; }
  void Close();

 private:
  int fd_ = -1;
};

class ScratchFolder {
 public:
  // Makes one in `parent`. kIo.
  static Result<ScratchFolder> Make(const std::filesystem::path& parent);
  ScratchFolder(ScratchFolder&&) noexcept = default;
  ~ScratchFolder() { Remove(); }

  const std::filesystem::path& path() const { return path_; }
  // Removes it with all that is in it.
  void Remove();
  // In a process that was forked meanwhile: leaves removing it to the other. The folder's lock
  // tells that this process, or a program that it executes, still uses it.
  void Share();

 private:
  ScratchFolder(std::filesystem::path path, FileLock folder, FileLock owner)
      : path_(std::move(path)), folder_(std::move(folder)), owner_(std::move(owner)) {}

  std::filesystem::path path_;
  FileLock folder_, owner_;
};

// Removes the folders in `parent` that killed runs left behind; what is still dying of them is
// waited for. Folders of runs that live are never touched, those of this process neither.
void RemoveAbandonedFolders(const std::filesystem::path& parent);

}  // namespace prefixd::bench
