#include "tests/reliability/harness/child.h"

#include <fcntl.h>
#include <poll.h>
#include <spdlog/spdlog.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace prefixd::storage::reliability {
namespace fs = std::filesystem;

std::string ChildEnd::Describe() const {
  if (hung) return "it hung and was killed";
  if (signal != 0) return std::string("it died of ") + ::strsignal(signal);
  return "it ended with exit code " + std::to_string(code);
}

Child::Child(const std::function<int()>& body, const fs::path& errors) {
  std::fflush(nullptr);
  const pid_t parent = ::getpid();
  pid_ = ::fork();
  if (pid_ < 0) {
    std::perror("fork");
    std::abort();
  }
  if (pid_ == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    // A short life touches a huge page once, so zeroing it would be wasted.
    ::prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0);
    if (::getppid() != parent) std::_Exit(79);
    // The parent handles a signal to the terminal's group.
    ::signal(SIGINT, SIG_IGN);
    ::signal(SIGTERM, SIG_IGN);
    if (!errors.empty()) {
      const int fd = ::open(errors.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
      ::dup2(fd, STDERR_FILENO);
    }
    spdlog::set_level(spdlog::level::off);  // stores' messages about crashes are expected here
    const int code = body();
    std::fflush(nullptr);
    std::_Exit(code);
  }
  pid_fd_ = static_cast<int>(::syscall(SYS_pidfd_open, pid_, 0));
  if (pid_fd_ < 0) {
    std::perror("pidfd_open");
    std::abort();
  }
}

Child::~Child() {
  if (pid_ > 0) {
    Kill();
    ::waitpid(pid_, nullptr, 0);
  }
  if (pid_fd_ >= 0) ::close(pid_fd_);
}

void Child::Kill() { ::kill(pid_, SIGKILL); }

bool Child::WaitFor(std::chrono::microseconds time) {
  using Clock = std::chrono::steady_clock;
  const auto until = Clock::now() + time;
  pollfd poll_fd{pid_fd_, POLLIN, 0};
  while (true) {
    const auto left =
        std::chrono::duration_cast<std::chrono::nanoseconds>(until - Clock::now()).count();
    if (left < 0) return false;
    const timespec wait{left / 1'000'000'000, left % 1'000'000'000};
    if (::ppoll(&poll_fd, 1, &wait, nullptr) > 0) return true;
  }
}

ChildEnd Child::Wait() {
  ChildEnd end;
  if (!WaitFor(std::chrono::seconds(60))) {
    end.hung = true;
    Kill();
  }
  int status = 0;
  ::waitpid(pid_, &status, 0);
  pid_ = -1;
  end.exited = WIFEXITED(status);
  if (end.exited) end.code = WEXITSTATUS(status);
  if (WIFSIGNALED(status)) end.signal = WTERMSIG(status);
  return end;
}

ChildEnd RunChild(const std::function<int()>& body, const fs::path& errors) {
  return Child(body, errors).Wait();
}

Scratch::Scratch(bool on_device) {
  const char* chosen = std::getenv("PREFIXD_RELIABILITY_DIR");
  const fs::path base = chosen != nullptr                               ? fs::path(chosen)
                        : !on_device && ::access("/dev/shm", W_OK) == 0 ? fs::path("/dev/shm")
                                                                        : fs::temp_directory_path();
  std::string pattern = (base / "prefixd-reliability-XXXXXX").string();
  if (::mkdtemp(pattern.data()) == nullptr) {
    std::perror(pattern.c_str());
    std::abort();
  }
  path_ = pattern;
}

Scratch::~Scratch() {
  std::error_code ignored;
  fs::remove_all(path_, ignored);
}

}  // namespace prefixd::storage::reliability
