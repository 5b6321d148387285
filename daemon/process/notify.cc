#include "daemon/process/notify.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <optional>

namespace prefixd::daemon {

Status Notify(std::string_view assignments) {
  const char* socket = std::getenv("NOTIFY_SOCKET");
  return socket && *socket ? NotifyAt(socket, assignments) : Status();
}

std::chrono::microseconds WatchdogInterval() {
  const auto number = [](const char* name) -> std::optional<int64_t> {
    const char* text = std::getenv(name);
    int64_t value = 0;
    if (text == nullptr) return std::nullopt;
    const char* end = text + std::strlen(text);
    const auto [at, wrong] = std::from_chars(text, end, value);
    return wrong == std::errc{} && at == end && value > 0 ? value : 0;
  };
  const auto pid = number("WATCHDOG_PID");
  if (pid && *pid != ::getpid()) return {};
  return std::chrono::microseconds(number("WATCHDOG_USEC").value_or(0) / 2);
}

Status NotifyAt(const std::string& socket, std::string_view assignments) {
  const auto failed = [&](const std::string& why) {
    return Error{Code::kIo, "cannot notify the service manager at " + socket + ": " + why};
  };
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (socket.size() < 2 || (socket[0] != '/' && socket[0] != '@')) {
    return failed("neither an absolute path nor @NAME");
  }
  // A path needs its terminating zero; an abstract name has none and begins with one instead.
  const bool abstract = socket[0] == '@';
  if (socket.size() + !abstract > sizeof(address.sun_path)) return failed("name too long");
  std::memcpy(address.sun_path, socket.data(), socket.size());
  if (abstract) address.sun_path[0] = '\0';
  const auto length =
      static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + socket.size() + !abstract);

  const int fd = ::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return failed(std::strerror(errno));
  ssize_t sent = 0;
  do {
    sent = ::sendto(fd, assignments.data(), assignments.size(), MSG_NOSIGNAL,
                    reinterpret_cast<const sockaddr*>(&address), length);
  } while (sent < 0 && errno == EINTR);
  const int err = errno;
  ::close(fd);
  if (sent != static_cast<ssize_t>(assignments.size())) return failed(std::strerror(err));
  return {};
}

}  // namespace prefixd::daemon
