// Tests what threads see that share a link to a daemon which does not answer.
#include "client_lib/link.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <barrier>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/expect_ok.h"
#include "tests/support/files.h"
#include "tests/support/test.h"

namespace prefixd::testing {
namespace {

// Takes connections, counts them, and never says a word.
class SilentDaemon {
 public:
  explicit SilentDaemon(const std::string& path)
      : fd_(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
    EXPECT_EQ(::bind(fd_, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    EXPECT_EQ(::listen(fd_, 64), 0);
    accepting_ = std::thread([this] {
      while (true) {
        const int taken = ::accept(fd_, nullptr, nullptr);
        if (taken < 0) return;
        taken_.push_back(taken);
        ++connections_;
      }
    });
  }
  ~SilentDaemon() {
    ::shutdown(fd_, SHUT_RDWR);
    accepting_.join();
    for (const int taken : taken_) ::close(taken);
    ::close(fd_);
  }
  int connections() const { return connections_; }

 private:
  const int fd_;
  std::thread accepting_;
  std::vector<int> taken_;
  std::atomic<int> connections_ = 0;
};

TEST(LinkTest, CallsThatWaitForAnAttemptShareItsFailure) {
  const TempDir dir;
  const std::string path = dir.path() / "silent.sock";
  const SilentDaemon daemon(path);
  const auto address = Address::Parse("unix:" + path);
  ASSERT_OK(address);
  Link link(*address, {.connect_timeout_ms = 200});
  constexpr int kThreads = 8;
  std::barrier together(kThreads);
  std::atomic<int> failed = 0;
  {
    std::vector<std::jthread> threads;
    for (int i = 0; i < kThreads; ++i) {
      threads.emplace_back([&] {
        together.arrive_and_wait();
        const auto live = link.Live();
        if (!live.ok()) ++failed;
      });
    }
  }
  EXPECT_EQ(failed, kThreads);
  EXPECT_LT(daemon.connections(), kThreads);
  // A later call tries for itself.
  const int before = daemon.connections();
  EXPECT_FALSE(link.Live().ok());
  while (daemon.connections() == before) std::this_thread::yield();  // it counts a moment later
}

}  // namespace
}  // namespace prefixd::testing
