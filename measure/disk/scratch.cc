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

// The folder's lock tells whether a process still uses it.
int LockFolder(const fs::path& dir) {
  const int fd = ::open(dir.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return -1;
  if (::flock(fd, LOCK_EX | LOCK_NB) == 0) return fd;
  ::close(fd);
  return -1;
}

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

void RemoveAbandoned(const fs::path& parent) {
  std::error_code ec;
  std::vector<fs::path> found;
  for (const auto& entry : fs::directory_iterator(parent, ec)) {
    if (entry.path().filename().string().rfind(kPrefix, 0) == 0) found.push_back(entry.path());
  }
  for (const fs::path& dir : found) {
    struct stat s {};
    if (::lstat(dir.c_str(), &s) != 0 || !S_ISDIR(s.st_mode) || s.st_uid != ::geteuid()) continue;
    const int fd = LockFolder(dir);
    if (fd < 0) continue;
    RemoveFolder(dir);
    ::close(fd);
  }
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
  std::string name = (parent / (std::string(kPrefix) + "XXXXXX")).string();
  const auto fail = [&](const std::string& what) {
    const std::string why = std::strerror(errno);
    ::sigprocmask(SIG_SETMASK, &before, nullptr);
    return Error{Code::kIo, what + ": " + why};
  };
  if (::mkdtemp(name.data()) == nullptr) return fail("cannot make a folder in " + parent.string());
  const int lock = LockFolder(name);
  std::fflush(nullptr);
  ::signal(SIGCHLD, SIG_DFL);  // an ignored one tells nothing of the child
  const pid_t parent_pid = ::getpid();
  const pid_t child = ::fork();
  if (child < 0) {
    RemoveFolder(name);
    return fail("cannot start a process");
  }
  if (child == 0) {
    ::setpgid(0, 0);
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::getppid() != parent_pid) ::_exit(1);
    ::sigprocmask(SIG_SETMASK, &before, nullptr);
    const int code = work(name);
    std::fflush(nullptr);
    ::_exit(code);
  }
  ::setpgid(child, child);  // whichever of the two is first
  const int code = Supervise(child, signals);
  RemoveFolder(name);
  if (lock >= 0) ::close(lock);
  ::sigprocmask(SIG_SETMASK, &before, nullptr);
  return code;
}

}  // namespace prefixd::bench
