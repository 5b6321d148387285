#include "bench/steps/daemon_child.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <iterator>

namespace prefixd::bench {

Status DaemonChild::Start(const std::string& program, const std::vector<std::string>& args) {
  if (dir_.empty()) {
    std::string name = (parent_ / "prefixd-bench-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) {
      return Error{Code::kIo, "cannot make a directory for the daemon in " + parent_.string()};
    }
    dir_ = name;
  }
  int ready[2];
  if (::pipe2(ready, 0) != 0) return Error{Code::kIo, "cannot make a pipe for the daemon"};
  const std::filesystem::path log = dir_ / "log";
  std::vector<std::string> all = {program,
                                  "--dir",
                                  (store_.empty() ? dir_ / "store" : store_).string(),
                                  "--socket",
                                  (dir_ / "s").string(),
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
  std::ifstream said(log);
  return Error{Code::kUnavailable, "the daemon did not start: " +
                                       std::string(std::istreambuf_iterator<char>(said), {})};
}

void DaemonChild::End(int signal) {
  if (pid_ <= 0) return;
  ::kill(pid_, signal);
  ::waitpid(pid_, nullptr, 0);
  pid_ = -1;
}

void DaemonChild::Stop() { End(SIGTERM); }
void DaemonChild::Kill() { End(SIGKILL); }

DaemonChild::~DaemonChild() {
  Kill();
  std::error_code ignored;
  if (!dir_.empty()) std::filesystem::remove_all(dir_, ignored);
}

}  // namespace prefixd::bench
