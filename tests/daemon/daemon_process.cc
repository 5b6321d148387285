#include "tests/daemon/daemon_process.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <thread>

namespace prefixd::testing {
namespace {

pid_t Spawn(const std::string& program, const std::vector<std::string>& args,
            const std::string& out, const std::string& err) {
  std::vector<char*> argv = {const_cast<char*>(program.c_str())};
  for (const std::string& a : args) argv.push_back(const_cast<char*>(a.c_str()));
  argv.push_back(nullptr);
  const pid_t pid = ::fork();
  if (pid == 0) {
    const int out_fd = ::open(out.c_str(), O_CREAT | O_WRONLY | O_TRUNC, 0600);
    const int err_fd = ::open(err.c_str(), O_CREAT | O_WRONLY | O_TRUNC, 0600);
    ::dup2(out_fd, 1);
    ::dup2(err_fd, 2);
    ::execv(program.c_str(), argv.data());
    ::_exit(127);
  }
  return pid;
}

int ExitCode(int status) {
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

// Returns the process's wait status; kills it when it does not end within two minutes.
int WaitFor(pid_t pid) {
  int status = 0;
  for (int i = 0; i < 12000; ++i) {
    if (::waitpid(pid, &status, WNOHANG) == pid) return status;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  ::kill(pid, SIGKILL);
  ::waitpid(pid, &status, 0);
  return status;
}

}  // namespace

Finished RunProgram(const std::string& program, const std::vector<std::string>& args) {
  TempDir dir;
  const std::string out = dir.path() / "out", err = dir.path() / "err";
  const pid_t pid = Spawn(program, args, out, err);
  const int status = WaitFor(pid);
  return {ExitCode(status), ReadFile(out), ReadFile(err)};
}

DaemonProcess::DaemonProcess(const std::filesystem::path& dir, const std::vector<std::string>& args,
                             Await await)
    : socket_(dir / "s"), err_file_(dir / "stderr") {
  int fds[2];
  if (::pipe2(fds, 0) != 0) return;
  ::fcntl(fds[0], F_SETFD, FD_CLOEXEC);
  std::vector<std::string> all = {"--dir",          (dir / "store").string(),
                                  "--socket",       socket_,
                                  "--min-free-mib", "0",
                                  "--threads",      "2",
                                  "--ready-fd",     std::to_string(fds[1])};
  if (std::find(args.begin(), args.end(), "--host-tier-mib") == args.end()) {
    all.insert(all.end(), {"--host-tier-mib", "64"});
  }
  all.insert(all.end(), args.begin(), args.end());
  pid_ = Spawn(PREFIXD_BINARY, all, dir / "stdout", err_file_);
  ::close(fds[1]);
  char buffer[512];
  for (ssize_t n; await == Await::kReady &&
                  (n = ::read(fds[0], buffer, sizeof(buffer))) > 0;) {  // ends with the daemon
    ready_line_.append(buffer, size_t(n));
  }
  ::close(fds[0]);
}

DaemonProcess::~DaemonProcess() {
  if (pid_ > 0) {
    ::kill(pid_, SIGKILL);
    Wait();
  }
}

std::string DaemonProcess::tcp_address() const {
  const size_t at = std::min(ready_line_.find("tcp:"), ready_line_.find("tls:"));
  if (at == std::string::npos) return "";
  return ready_line_.substr(at, ready_line_.find_first_of(" \n", at) - at);
}

void DaemonProcess::Signal(int signal) { ::kill(pid_, signal); }

int DaemonProcess::Wait() {
  if (pid_ <= 0) return code_;
  code_ = ExitCode(WaitFor(pid_));
  pid_ = -1;
  return code_;
}

std::string DaemonProcess::Stderr() const { return ReadFile(err_file_); }

}  // namespace prefixd::testing
