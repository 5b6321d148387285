#include "daemon/connections/listener.h"

#include <grp.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <utility>

#include "protocol/socket.h"

namespace prefixd::daemon {
namespace {

constexpr int kBacklog = 128;

Error Errno(Code code, const std::string& what) {
  return {code, what + ": " + std::strerror(errno)};
}

// Removes a socket file that no daemon answers on; any other file is an error and stays.
Status RemoveStale(const Address& address) {
  struct stat st {};
  if (::lstat(address.path.c_str(), &st) != 0) {
    if (errno == ENOENT) return {};
    return Errno(Code::kIo, "cannot look at " + address.path);
  }
  if (!S_ISSOCK(st.st_mode)) {
    return Error{Code::kFailedPrecondition,
                 address.path + " exists and is no socket; name another path or remove it"};
  }
  const auto soon = Socket::Clock::now() + std::chrono::seconds(2);
  if (Socket::Connect(address, soon).ok()) {
    return Error{Code::kFailedPrecondition, "another daemon answers on " + address.path};
  }
  if (::unlink(address.path.c_str()) != 0 && errno != ENOENT) {
    return Errno(Code::kIo, "cannot remove the stale socket " + address.path);
  }
  return {};
}

Result<gid_t> GroupOf(const std::string& name) {
  gid_t number = 0;
  const char* const end = name.data() + name.size();
  if (const auto [at, ec] = std::from_chars(name.data(), end, number);
      ec == std::errc{} && at == end)
    return number;
  std::array<char, 65536> buffer;
  group entry{};
  group* found = nullptr;
  ::getgrnam_r(name.c_str(), &entry, buffer.data(), buffer.size(), &found);
  if (found == nullptr) {
    return InvalidArgument("listen.socket_group: there is no group '" + name + "' here");
  }
  return found->gr_gid;
}

}  // namespace

Listener::Listener(Listener&& other) noexcept { *this = std::move(other); }

Listener& Listener::operator=(Listener&& other) noexcept {
  std::swap(address_, other.address_);
  std::swap(fd_, other.fd_);
  std::swap(owns_file_, other.owns_file_);
  std::swap(device_, other.device_);
  std::swap(inode_, other.inode_);
  return *this;
}

Listener::~Listener() {
  RemoveFile();
  if (fd_ >= 0) ::close(fd_);
}

int Listener::Release() { return std::exchange(fd_, -1); }

void Listener::RemoveFile() {
  struct stat st {};
  if (owns_file_ && ::lstat(address_.path.c_str(), &st) == 0 && st.st_dev == device_ &&
      st.st_ino == inode_) {
    ::unlink(address_.path.c_str());
  }
  owns_file_ = false;
}

Result<Listener> Listener::Unix(const std::string& path, bool group,
                                const std::string& group_name) {
  Listener listener;
  gid_t gid = ::getegid();
  if (!group_name.empty()) {
    PREFIXD_ASSIGN(gid, GroupOf(group_name));
  }
  PREFIXD_ASSIGN(listener.address_, Address::Parse("unix:" + path));
  PREFIXD_TRY(RemoveStale(listener.address_));
  listener.fd_ = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (listener.fd_ < 0) return Errno(Code::kIo, "socket");
  // The mode is set before bind, so that the file never has wider rights: Linux gives a socket's
  // file the mode of the descriptor.
  ::fchmod(listener.fd_, 0600);
  sockaddr_un sun{};
  sun.sun_family = AF_UNIX;
  std::memcpy(sun.sun_path, path.data(), path.size());
  if (::bind(listener.fd_, reinterpret_cast<sockaddr*>(&sun), sizeof(sun)) != 0) {
    return Errno(Code::kIo, "cannot bind the socket " + path);
  }
  struct stat st {};
  if (::lstat(path.c_str(), &st) == 0) {
    listener.owns_file_ = true;
    listener.device_ = st.st_dev;
    listener.inode_ = st.st_ino;
  }
  // The group's rights are set after bind, which applies the umask. A client of the group that
  // connects in between is refused, as with 0600. A file that has the group already, as it has the
  // daemon's own, is left alone: a sandbox may forbid chown.
  const bool other_group = !group_name.empty() && st.st_gid != gid;
  if (group && other_group && ::lchown(path.c_str(), static_cast<uid_t>(-1), gid) != 0) {
    return Errno(Code::kFailedPrecondition,
                 "cannot give the socket " + path + " to the group " + group_name +
                     " (listen.socket_group): the daemon's user must be a member of it (in a "
                     "service, SupplementaryGroups=), and the sandbox must allow chown");
  }
  if (group && ::chmod(path.c_str(), 0660) != 0) {
    return Errno(Code::kIo, "cannot let the group connect to " + path);
  }
  if (::listen(listener.fd_, kBacklog) != 0) return Errno(Code::kIo, "listen on " + path);
  return listener;
}

Result<Listener> Listener::Tcp(const Address& address) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE;
  addrinfo* found = nullptr;
  const int rc =
      ::getaddrinfo(address.host.c_str(), std::to_string(address.port).c_str(), &hints, &found);
  if (rc != 0) {
    return InvalidArgument("listen.tcp: cannot resolve '" + address.host +
                           "': " + ::gai_strerror(rc));
  }
  Listener listener;
  listener.address_ = address;
  listener.fd_ = ::socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  const int one = 1;
  int err = errno;
  bool ok = listener.fd_ >= 0;
  if (ok) {
    ::setsockopt(listener.fd_, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
    ok = ::bind(listener.fd_, found->ai_addr, found->ai_addrlen) == 0 &&
         ::listen(listener.fd_, kBacklog) == 0;
    err = errno;
  }
  ::freeaddrinfo(found);
  if (!ok) {
    return Error{Code::kFailedPrecondition,
                 "cannot listen on " + address.ToString() + ": " + std::strerror(err)};
  }
  sockaddr_storage bound{};
  socklen_t length = sizeof(bound);
  if (::getsockname(listener.fd_, reinterpret_cast<sockaddr*>(&bound), &length) == 0) {
    listener.address_.port =
        ntohs(bound.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&bound)->sin6_port
                                          : reinterpret_cast<sockaddr_in*>(&bound)->sin_port);
  }
  return listener;
}

}  // namespace prefixd::daemon
