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
