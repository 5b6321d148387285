#include "measure/disk/scratch.h"

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

#include "measure/disk/scratch_folder.h"

namespace prefixd::bench {
namespace {

namespace fs = std::filesystem;

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
  RemoveAbandonedFolders(parent);
  // From here on no signal ends this process before the folder is gone.
  sigset_t signals, before;
  sigemptyset(&signals);
  for (const int s : {SIGINT, SIGTERM, SIGHUP, SIGCHLD}) sigaddset(&signals, s);
  ::sigprocmask(SIG_BLOCK, &signals, &before);
  auto scratch = ScratchFolder::Make(parent);
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
    scratch->Remove();
    ::sigprocmask(SIG_SETMASK, &before, nullptr);
    return Error{Code::kIo, "cannot start a process: " + why};
  }
  if (child == 0) {
    scratch->Share();
    ::setpgid(0, 0);
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::getppid() != parent_pid) ::_exit(1);
    ::sigprocmask(SIG_SETMASK, &before, nullptr);
    const int code = work(scratch->path());
    std::fflush(nullptr);
    ::_exit(code);
  }
  ::setpgid(child, child);  // whichever of the two is first
  const int code = Supervise(child, signals);
  scratch->Remove();
  ::sigprocmask(SIG_SETMASK, &before, nullptr);
  return code;
}

}  // namespace prefixd::bench
