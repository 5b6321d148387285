#include "measure/disk/scratch.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

namespace prefixd::bench {
namespace {

namespace fs = std::filesystem;

constexpr const char* kPrefix = "prefixd-bench-";

// The nearest directory above `path` that exists, or it.
fs::path Existing(fs::path path) {
  std::error_code ec;
  path = fs::absolute(path, ec);
  while (!fs::exists(path, ec) && path.has_relative_path()) path = path.parent_path();
  return path;
}

bool HoldsStore(const fs::path& dir) {
  std::error_code ec;
  return fs::exists(dir / "STORE", ec) || fs::exists(dir / "segments", ec);
}

// Two locks tell how a run stands. The folder's is held until all its processes have ended: the
// measuring one shares it. That of kOwner is held by the process that will remove the folder.
constexpr const char* kOwner = ".owner";
constexpr int kDyingMs = 60'000;  // a killed process first gives back its memory and ends its I/O

class Lock {
 public:
  // `flags` of open(2) and `operation` of flock(2). Not held where another holds it, or where the
  // path leads elsewhere by then: its last holder has removed it.
  Lock(const fs::path& path, int flags, int operation) {
    fd_ = ::open(path.c_str(), flags | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (fd_ < 0) return;
    struct stat locked {
    }, there{};
    if (::flock(fd_, operation) != 0 || ::fstat(fd_, &locked) != 0 ||
        ::lstat(path.c_str(), &there) != 0 || locked.st_ino != there.st_ino ||
        locked.st_dev != there.st_dev) {
      Close();
    }
  }
  Lock(Lock&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  ~Lock() { Close(); }

  bool held() const { return fd_ >= 0; }
  // In a process that was forked meanwhile: leaves the lock to the others.
  void Close() {
    if (fd_ >= 0) ::close(std::exchange(fd_, -1));
  }

 private:
  int fd_ = -1;
};

Lock LockFolder(const fs::path& dir) { return {dir, O_RDONLY | O_DIRECTORY, LOCK_EX | LOCK_NB}; }

void RemoveFolder(const fs::path& dir) {
  // A writer that is just dying may add a file meanwhile.
  for (int i = 0; i < 20; ++i) {
    std::error_code ec;
    fs::remove_all(dir, ec);
    if (!fs::exists(dir, ec)) return;
    ::usleep(50'000);
  }
  std::fprintf(stderr, "prefixctl: cannot remove %s; remove it yourself\n", dir.c_str());
}

// True where the process that would remove the folder is gone; a folder without kOwner has one that
// is about to make it, or had none that lived so long.
bool Orphaned(const fs::path& dir) {
  return Lock(dir / kOwner, O_RDONLY, LOCK_SH | LOCK_NB).held();
}

// Removes the folder of a run that was killed, and no other. What it was measuring with may still
// be dying; that is waited for.
void RemoveIfAbandoned(const fs::path& dir) {
  constexpr int kPauseMs = 20;
  for (int waited = 0;; waited += kPauseMs) {
    if (const Lock lock = LockFolder(dir); lock.held()) return RemoveFolder(dir);
    if (!Orphaned(dir)) return;
    if (waited >= kDyingMs) break;
    ::usleep(kPauseMs * 1000);
  }
  std::fprintf(stderr,
               "prefixctl: %s is left of a killed run, of which a process still does not end\n",
               dir.c_str());
}

void RemoveAbandoned(const fs::path& parent) {
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

struct Scratch {
  std::string path;
  Lock folder, owner;
};

// Between making a folder and locking it another run may take it for one that was left behind: then
// a further one is made. kIo.
Result<Scratch> MakeScratch(const fs::path& parent) {
  for (int attempt = 0; attempt < 16; ++attempt) {
    std::string name = (parent / (std::string(kPrefix) + "XXXXXX")).string();
    if (::mkdtemp(name.data()) == nullptr) break;
    Lock folder = LockFolder(name);
    if (!folder.held()) continue;
    Lock owner(fs::path(name) / kOwner, O_RDWR | O_CREAT, LOCK_EX);
    if (owner.held()) return Scratch{std::move(name), std::move(folder), std::move(owner)};
    RemoveFolder(name);
    break;
  }
  return Error{Code::kIo,
               "cannot make a folder in " + parent.string() + ": " + std::strerror(errno)};
}

// Waits for the child; a signal ends it first. Returns the exit code.
int Supervise(pid_t child, const sigset_t& signals) {
  int interrupted = 0, status = 0;
  while (true) {
    siginfo_t info{};
    const int signal = ::sigwaitinfo(&signals, &info);
    if (signal > 0 && signal != SIGCHLD) {
      interrupted = signal;
      ::kill(-child, SIGKILL);
      ::kill(child, SIGKILL);
    }
    const pid_t done = ::waitpid(child, &status, interrupted ? 0 : WNOHANG);
    if (done == child || (done < 0 && errno != EINTR)) break;
  }
  ::kill(-child, SIGKILL);  // what it started
  if (interrupted) return 128 + interrupted;
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

}  // namespace

bool OnOneDisk(const fs::path& a, const fs::path& b) {
  struct stat s {
  }, t{};
  return ::stat(Existing(a).c_str(), &s) == 0 && ::stat(Existing(b).c_str(), &t) == 0 &&
         s.st_dev == t.st_dev;
}

fs::path ScratchParent(const fs::path& store) {
  std::error_code ec;
  std::vector<fs::path> writable;
  for (const fs::path& dir :
       {fs::path("/var/tmp"), fs::temp_directory_path(ec), fs::path("/tmp")}) {
    if (!dir.empty() && ::access(dir.c_str(), W_OK | X_OK) == 0) writable.push_back(dir);
  }
  for (const fs::path& dir : writable) {
    if (OnOneDisk(dir, store)) return dir;
  }
  return writable.empty() ? fs::path("/tmp") : writable.front();
}

Status CheckScratchParent(const fs::path& parent) {
  std::error_code ec;
  if (!fs::is_directory(parent, ec)) {
    return Error{Code::kInvalidArgument,
                 "'" + parent.string() + "' is no directory; --dir names one that exists"};
  }
  for (fs::path dir = fs::absolute(parent, ec);; dir = dir.parent_path()) {
    if (HoldsStore(dir)) {
      return Error{Code::kFailedPrecondition,
                   "'" + dir.string() +
                       "' holds a store; measure in another directory of the same disk (--dir)"};
    }
    if (!dir.has_relative_path()) break;
  }
  if (::access(parent.c_str(), W_OK | X_OK) != 0) {
    return Error{Code::kInvalidArgument, "cannot write to '" + parent.string() +
                                             "': " + std::strerror(errno) +
                                             "; --dir names another directory"};
  }
  return {};
}

uint64_t FreeBytes(const fs::path& parent) {
  std::error_code ec;
  const fs::space_info space = fs::space(parent, ec);
  return ec ? 0 : space.available;
}

Result<int> RunInScratch(const fs::path& parent, const std::function<int(const fs::path&)>& work) {
  PREFIXD_TRY(CheckScratchParent(parent));
  RemoveAbandoned(parent);
  // From here on no signal ends this process before the folder is gone.
  sigset_t signals, before;
  sigemptyset(&signals);
  for (const int s : {SIGINT, SIGTERM, SIGHUP, SIGCHLD}) sigaddset(&signals, s);
  ::sigprocmask(SIG_BLOCK, &signals, &before);
  auto scratch = MakeScratch(parent);
  if (!scratch.ok()) {
    ::sigprocmask(SIG_SETMASK, &before, nullptr);
    return scratch.error();
  }
  std::fflush(nullptr);
  ::signal(SIGCHLD, SIG_DFL);  // an ignored one tells nothing of the child
  const pid_t parent_pid = ::getpid();
  const pid_t child = ::fork();
  if (child < 0) {
    const std::string why = std::strerror(errno);
    RemoveFolder(scratch->path);
    ::sigprocmask(SIG_SETMASK, &before, nullptr);
    return Error{Code::kIo, "cannot start a process: " + why};
  }
  if (child == 0) {
    scratch->owner.Close();
    ::setpgid(0, 0);
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::getppid() != parent_pid) ::_exit(1);
    ::sigprocmask(SIG_SETMASK, &before, nullptr);
    const int code = work(scratch->path);
    std::fflush(nullptr);
    ::_exit(code);
  }
  ::setpgid(child, child);  // whichever of the two is first
  const int code = Supervise(child, signals);
  RemoveFolder(scratch->path);
  ::sigprocmask(SIG_SETMASK, &before, nullptr);
  return code;
}

}  // namespace prefixd::bench
