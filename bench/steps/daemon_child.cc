#include "bench/steps/daemon_child.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>
#include <iterator>

namespace prefixd::bench {
namespace {

std::string HowItEnded(int status) {
  return WIFSIGNALED(status) ? "was ended by signal " + std::to_string(WTERMSIG(status))
                             : "ended with status " + std::to_string(WEXITSTATUS(status));
}

}  // namespace

Status DaemonChild::Start(const std::string& program, const std::vector<std::string>& args) {
  if (!folder_) {
    RemoveAbandonedFolders(parent_);
    PREFIXD_ASSIGN(ScratchFolder made, ScratchFolder::Make(parent_));
    folder_.emplace(std::move(made));
  }
  int ready[2];
  if (::pipe2(ready, 0) != 0) return Error{Code::kIo, "cannot make a pipe for the daemon"};
  const std::filesystem::path log = dir() / "log";
  std::vector<std::string> all = {program,
                                  "--dir",
                                  (store_.empty() ? dir() / "store" : store_).string(),
                                  "--socket",
                                  (dir() / "s").string(),
                                  "--min-free-mib",
                                  "0",
                                  "--threads",
                                  "2",
                                  "--ready-fd",
                                  std::to_string(ready[1])};
  all.insert(all.end(), args.begin(), args.end());
  std::vector<char*> argv;
  for (std::string& arg : all) argv.push_back(arg.data());
  argv.push_back(nullptr);
  ::fcntl(ready[0], F_SETFD, FD_CLOEXEC);
  pid_ = ::fork();
  if (pid_ == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    ::setsid();
    folder_->Share();
    const int out = ::open(log.c_str(), O_CREAT | O_WRONLY | O_TRUNC, 0600);
    ::dup2(out, 1);
    ::dup2(out, 2);
    ::execv(program.c_str(), argv.data());
    ::_exit(127);
  }
  ::close(ready[1]);
  char first;
  const bool serves = ::read(ready[0], &first, 1) == 1;  // ends with the daemon
  ::close(ready[0]);
  if (serves) return {};
  return Error{Code::kUnavailable, "the daemon did not start: " + Said()};
}

std::string DaemonChild::Said() const {
  constexpr size_t kMost = 4000;  // the end tells most
  std::ifstream log(dir() / "log");
  const std::string said(std::istreambuf_iterator<char>(log), {});
  return said.size() > kMost ? said.substr(said.size() - kMost) : said;
}

int DaemonChild::End(int signal) {
  ::kill(pid_, signal);
  int status = 0;
  while (::waitpid(pid_, &status, 0) < 0 && errno == EINTR) {
  }
  pid_ = -1;
  return status;
}

Status DaemonChild::Stop() {
  if (pid_ <= 0) return {};
  const int status = End(SIGTERM);
  if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return {};
  return Error{Code::kInternal, "the daemon " + HowItEnded(status) + ": " + Said()};
}

Status DaemonChild::Kill() {
  if (pid_ <= 0) return {};
  const int status = End(SIGKILL);
  if (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) return {};
  return Error{Code::kInternal,
               "the daemon " + HowItEnded(status) + " before it was killed: " + Said()};
}

DaemonChild::~DaemonChild() {
  if (pid_ > 0) End(SIGKILL);
}

}  // namespace prefixd::bench
