#include "measure/disk/scratch_folder.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

namespace prefixd::bench {
namespace {

namespace fs = std::filesystem;

constexpr const char* kPrefix = "prefixd-bench-";

// Two locks tell how a run stands. The folder's is held until all its processes have ended: the
// measuring one shares it. That of kOwner is held by the process that will remove the folder.
constexpr const char* kOwner = ".owner";
constexpr int kDyingMs = 60'000;  // a killed process first gives back its memory and ends its I/O

// Not held where another holds it, or where the path leads elsewhere by then: its last
// holder has removed it. `flags` are those of open(2), `operation` that of flock(2).
FileLock Take(const fs::path& path, int flags, int operation) {
  FileLock lock(::open(path.c_str(), flags | O_NOFOLLOW | O_CLOEXEC, 0600));
  struct stat locked {
  }, there{};
  if (lock.held() && (::flock(lock.fd(), operation) != 0 || ::fstat(lock.fd(), &locked) != 0 ||
                      ::lstat(path.c_str(), &there) != 0 || locked.st_ino != there.st_ino ||
                      locked.st_dev != there.st_dev)) {
    lock.Close();
  }
  return lock;
}

FileLock LockFolder(const fs::path& dir) {
  return Take(dir, O_RDONLY | O_DIRECTORY, LOCK_EX | LOCK_NB);
}

void RemoveFolder(const fs::path& dir) {
  // A writer that is just dying may add a file meanwhile.
  for (int i = 0; i < 20; ++i) {
    std::error_code ec;
    fs::remove_all(dir, ec);
    if (!fs::exists(dir, ec)) return;
    ::usleep(50'000);
  }
  std::fprintf(stderr, "cannot remove %s; remove it yourself\n", dir.c_str());
}

// True where the process that would remove the folder is gone; a folder without kOwner has one that
// is about to make it, or had none that lived so long.
bool Orphaned(const fs::path& dir) {
  return Take(dir / kOwner, O_RDONLY, LOCK_SH | LOCK_NB).held();
}

// Removes the folder of a run that was killed, and no other. What it was measuring with may still
// be dying; that is waited for.
void RemoveIfAbandoned(const fs::path& dir) {
  constexpr int kPauseMs = 20;
  for (int waited = 0;; waited += kPauseMs) {
    if (const FileLock lock = LockFolder(dir); lock.held()) return RemoveFolder(dir);
    if (!Orphaned(dir)) return;
    if (waited >= kDyingMs) break;
    ::usleep(kPauseMs * 1000);
  }
  std::fprintf(stderr, "%s is left of a killed run, of which a process still does not end\n",
               dir.c_str());
}

}  // namespace

void FileLock::Close() {
  if (fd_ >= 0) ::close(std::exchange(fd_, -1));
}

void RemoveAbandonedFolders(const fs::path& parent) {
  std::error_code ec;
  std::vector<fs::path> found;
  for (const auto& entry : fs::directory_iterator(parent, ec)) {
    if (entry.path().filename().string().rfind(kPrefix, 0) == 0) found.push_back(entry.path());
  }
  for (const fs::path& dir : found) {
    struct stat s {};
    if (::lstat(dir.c_str(), &s) != 0 || !S_ISDIR(s.st_mode) || s.st_uid != ::geteuid()) continue;
    RemoveIfAbandoned(dir);
  }
}

// Between making a folder and locking it another run may take it for one that was left behind: then
// a further one is made.
Result<ScratchFolder> ScratchFolder::Make(const fs::path& parent) {
  for (int attempt = 0; attempt < 16; ++attempt) {
    std::string name = (parent / (std::string(kPrefix) + "XXXXXX")).string();
    if (::mkdtemp(name.data()) == nullptr) break;
    FileLock folder = LockFolder(name);
    if (!folder.held()) continue;
    FileLock owner = Take(fs::path(name) / kOwner, O_RDWR | O_CREAT, LOCK_EX);
    if (owner.held()) return ScratchFolder(std::move(name), std::move(folder), std::move(owner));
    RemoveFolder(name);
    break;
  }
  return Error{Code::kIo,
               "cannot make a folder in " + parent.string() + ": " + std::strerror(errno)};
}

void ScratchFolder::Share() {
  owner_.Close();
  ::fcntl(folder_.fd(), F_SETFD, 0);
}

void ScratchFolder::Remove() {
  if (!owner_.held()) return;
  RemoveFolder(path_);
  owner_.Close();
  folder_.Close();
}

}  // namespace prefixd::bench
