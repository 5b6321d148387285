// Tests what the daemon sends to a service manager (sd_notify(3)), on real datagram sockets.
#include "daemon/process/notify.h"

#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <string>

#include "tests/daemon/daemon_process.h"
#include "tests/support/test.h"

namespace prefixd {
namespace {

using testing::DaemonDir;
using testing::DaemonProcess;

// Receives as the service manager does, on a path or "@name".
class Manager {
 public:
  explicit Manager(const std::string& name) : fd_(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0)) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path, name.data(), name.size());
    if (name[0] == '@') address.sun_path[0] = '\0';
    bound_ =
        ::bind(fd_, reinterpret_cast<sockaddr*>(&address),
               socklen_t(offsetof(sockaddr_un, sun_path) + name.size() + (name[0] != '@'))) == 0;
    ::setenv("NOTIFY_SOCKET", name.c_str(), 1);
  }
  ~Manager() {
    ::unsetenv("NOTIFY_SOCKET");
    ::close(fd_);
  }
  bool bound() const { return bound_; }
  // Returns the next message; "" when none comes within `ms`.
  std::string Next(int ms = 20000) const {
    pollfd p{fd_, POLLIN, 0};
    if (::poll(&p, 1, ms) != 1) return "";
    char buffer[4096];
    const ssize_t n = ::recv(fd_, buffer, sizeof(buffer), 0);
    return n > 0 ? std::string(buffer, size_t(n)) : "";
  }

 private:
  int fd_;
  bool bound_;
};

TEST(Notify, SaysWhenItIsReadyAndWhenItStops) {
  DaemonDir dir;
  for (const std::string& name :
       {(dir.path() / "notify").string(), "@prefixd-notify-test-" + std::to_string(::getpid())}) {
    Manager manager(name);
    ASSERT_TRUE(manager.bound()) << name;
    DaemonProcess daemon(dir.path(), {"--shutdown-grace", "7"});
    ASSERT_TRUE(daemon.ready()) << daemon.Stderr();
    EXPECT_EQ(manager.Next(), "STATUS=Opening the store " + (dir.path() / "store").string());
    EXPECT_EQ(manager.Next(), "READY=1\nSTATUS=prefixd ready: unix:" + (dir.path() / "s").string());
    EXPECT_EQ(manager.Next(100), "");
    daemon.Signal(SIGTERM);
    // The extension is the grace and 20 s to close the store, in microseconds.
    EXPECT_EQ(manager.Next(), "STOPPING=1\nSTATUS=Finishing calls\nEXTEND_TIMEOUT_USEC=27000000");
    EXPECT_EQ(daemon.Wait(), 0) << daemon.Stderr();
    EXPECT_EQ(manager.Next(100), "");
  }
}

TEST(Notify, TellsTheWatchdogAsLongAsItRuns) {
  DaemonDir dir;
  Manager manager((dir.path() / "notify").string());
  ASSERT_TRUE(manager.bound());
  ::setenv("WATCHDOG_USEC", "100000", 1);
  DaemonProcess daemon(dir.path());
  ::unsetenv("WATCHDOG_USEC");
  ASSERT_TRUE(daemon.ready()) << daemon.Stderr();
  EXPECT_EQ(manager.Next().substr(0, 7), "STATUS=");
  EXPECT_EQ(manager.Next().substr(0, 7), "READY=1");
  for (int i = 0; i < 3; ++i) EXPECT_EQ(manager.Next(), "WATCHDOG=1");
  daemon.Signal(SIGSTOP);
  while (!manager.Next(1000).empty()) {  // sent before it stopped
  }
  EXPECT_EQ(manager.Next(1000), "");
  daemon.Signal(SIGCONT);
  EXPECT_EQ(manager.Next(), "WATCHDOG=1");
  daemon.Signal(SIGTERM);
  EXPECT_EQ(daemon.Wait(), 0) << daemon.Stderr();
}

TEST(Notify, WatchesWhenItIsMeant) {
  const auto interval = [](const char* usec, const char* pid) {
    ::setenv("WATCHDOG_USEC", usec, 1);
    pid ? ::setenv("WATCHDOG_PID", pid, 1) : ::unsetenv("WATCHDOG_PID");
    const auto us = daemon::WatchdogInterval().count();
    ::unsetenv("WATCHDOG_USEC");
    ::unsetenv("WATCHDOG_PID");
    return us;
  };
  EXPECT_EQ(daemon::WatchdogInterval().count(), 0);
  EXPECT_EQ(interval("3000000", nullptr), 1'500'000);
  EXPECT_EQ(interval("3000000", std::to_string(::getpid()).c_str()), 1'500'000);
  EXPECT_EQ(interval("3000000", "1"), 0);
  for (const char* bad : {"", "-5", "soon", "99999999999999999999"}) {
    EXPECT_EQ(interval(bad, nullptr), 0) << bad;
  }
}

TEST(Notify, ServesAllTheSameWhereNobodyListens) {
  DaemonDir dir;
  ::setenv("NOTIFY_SOCKET", (dir.path() / "nobody").c_str(), 1);
  DaemonProcess daemon(dir.path());
  ::unsetenv("NOTIFY_SOCKET");
  ASSERT_TRUE(daemon.ready()) << daemon.Stderr();
  EXPECT_NE(daemon.Stderr().find("cannot notify the service manager"), std::string::npos);
  daemon.Signal(SIGTERM);
  EXPECT_EQ(daemon.Wait(), 0);
}

TEST(Notify, RefusesWhatIsNoSocketName) {
  for (const std::string& bad : {std::string("relative"), std::string("/"), std::string("@"),
                                 std::string("vsock:2:1"), "/" + std::string(107, 'x')}) {
    EXPECT_FALSE(daemon::NotifyAt(bad, "READY=1").ok()) << bad;
  }
  ::unsetenv("NOTIFY_SOCKET");
  EXPECT_TRUE(daemon::Notify("READY=1").ok());
}

TEST(SocketAccess, TheGroupConnectsWhereItMay) {
  DaemonDir dir;
  const mode_t before = ::umask(0077);  // the umask of a systemd unit
  DaemonProcess daemon(dir.path(), {"--socket-access", "group"});
  ::umask(before);
  ASSERT_TRUE(daemon.ready()) << daemon.Stderr();
  struct stat st {};
  ASSERT_EQ(::stat(daemon.socket().c_str(), &st), 0);
  EXPECT_EQ(st.st_mode & 0777, 0660u);
}

}  // namespace
}  // namespace prefixd
