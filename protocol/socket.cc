#include "protocol/socket.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

namespace prefixd {
namespace {

constexpr size_t kTogetherBytes = 16384;  // of a record of TLS

Error Unavailable(const std::string& what, int err) {
  return {Code::kUnavailable, what + (err ? std::string(": ") + std::strerror(err) : "")};
}

// Starts a connection on a fresh non-blocking socket; the caller waits when *err is EINPROGRESS.
int StartConnect(int family, const sockaddr* address, socklen_t length, int* err) {
  const int fd = ::socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) {
    *err = errno;
    return -1;
  }
  *err = ::connect(fd, address, length) == 0 ? 0 : errno;
  return fd;
}

int PendingError(int fd) {
  int err = 0;
  socklen_t length = sizeof(err);
  return ::getsockopt(fd, SOL_SOCKET, SO_ERROR, &err, &length) == 0 ? err : errno;
}

}  // namespace

void SetTcpOptions(int fd) {
  const auto set = [fd](int level, int option, int value) {
    ::setsockopt(fd, level, option, &value, sizeof(value));
  };
  set(IPPROTO_TCP, TCP_NODELAY, 1);
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  set(IPPROTO_TCP, TCP_KEEPIDLE, 30);
  set(IPPROTO_TCP, TCP_KEEPINTVL, 10);
  set(IPPROTO_TCP, TCP_KEEPCNT, 6);
}

Socket::~Socket() { Close(); }
Socket::Socket(Socket&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)), tls_(std::move(other.tls_)) {}
Socket& Socket::operator=(Socket&& other) noexcept {
  std::swap(fd_, other.fd_);
  std::swap(tls_, other.tls_);
  return *this;
}

Descriptors::~Descriptors() {
  for (int fd = Take(); fd >= 0; fd = Take()) ::close(fd);
}

void Descriptors::Add(std::span<const int> fds) {
  for (const int fd : fds) {
    if (end_ < fds_.size()) {
      fds_[end_++] = fd;
    } else {
      ::close(fd);
    }
  }
}

int Descriptors::Take() { return first_ < end_ ? fds_[first_++] : -1; }

bool Socket::ended() const {
  pollfd p{fd_, POLLRDHUP, 0};
  return fd_ < 0 || (::poll(&p, 1, 0) > 0 && (p.revents & (POLLRDHUP | POLLHUP | POLLERR)) != 0);
}

void Socket::Interrupt() {
  if (fd_ >= 0) ::shutdown(fd_, SHUT_RDWR);
}

void Socket::Close() {
  tls_.reset();
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

Result<Socket> Socket::Connect(const Address& address, Deadline deadline) {
  const std::string where = address.ToString();
  Socket socket;
  int err = 0;
  if (address.kind == Address::Kind::kUnix) {
    sockaddr_un sun{};
    sun.sun_family = AF_UNIX;
    if (address.path.size() > kMaxSocketPathBytes) return InvalidArgument("socket path too long");
    std::memcpy(sun.sun_path, address.path.data(), address.path.size());
    // A Unix socket with a full backlog fails with EAGAIN instead of waiting, so connecting is
    // tried again until the deadline.
    while (true) {
      socket.Close();
      socket.fd_ = StartConnect(AF_UNIX, reinterpret_cast<sockaddr*>(&sun), sizeof(sun), &err);
      if (err != EAGAIN || (deadline && Clock::now() >= *deadline)) break;
      ::poll(nullptr, 0, 10);
    }
    if (err == 0) return socket;
    const std::string hint = err == ENOENT || err == ECONNREFUSED
                                 ? "no daemon answers at " + where + "; is prefixd running?"
                                 : "cannot connect to " + where;
    return Unavailable(hint, err);
  }

  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int rc =
      ::getaddrinfo(address.host.c_str(), std::to_string(address.port).c_str(), &hints, &found);
  if (rc != 0) {
    return Error{Code::kUnavailable, "cannot resolve " + where + ": " + ::gai_strerror(rc)};
  }
  for (const addrinfo* it = found; it != nullptr; it = it->ai_next) {
    socket.Close();
    socket.fd_ = StartConnect(it->ai_family, it->ai_addr, it->ai_addrlen, &err);
    if (err == EINPROGRESS) {
      err = socket.Wait(POLLOUT, deadline).ok() ? PendingError(socket.fd_) : ETIMEDOUT;
    }
    if (err == 0) break;
  }
  ::freeaddrinfo(found);
  if (err != 0) return Unavailable("no daemon answers at " + where + "; is prefixd running?", err);
  SetTcpOptions(socket.fd_);
  return socket;
}

Status Socket::Wait(short events, Deadline deadline) {
  while (true) {
    int timeout = -1;
    if (deadline) {
      const auto left =
          std::chrono::duration_cast<std::chrono::milliseconds>(*deadline - Clock::now()).count();
      if (left <= 0) return Unavailable("the daemon did not answer in time", 0);
      timeout = static_cast<int>(std::min<int64_t>(left + 1, 1 << 30));
    }
    pollfd p{fd_, events, 0};
    const int rc = ::poll(&p, 1, timeout);
    if (rc > 0) return {};
    if (rc < 0 && errno != EINTR) return Unavailable("poll", errno);
  }
}

Status Socket::Secure(std::unique_ptr<TlsChannel> channel, Deadline deadline) {
  tls_ = std::move(channel);
  while (true) {
    PREFIXD_ASSIGN(const TlsStep step, tls_->Handshake());
    if (step.wants == 0) return {};
    PREFIXD_TRY(Wait(step.wants, deadline));
  }
}

Status Socket::SendSecurely(std::span<const std::byte> bytes, Deadline deadline) {
  while (!bytes.empty()) {
    PREFIXD_ASSIGN(const TlsStep step, tls_->Write(bytes));
    bytes = bytes.subspan(step.bytes);
    if (step.wants != 0) PREFIXD_TRY(Wait(step.wants, deadline));
  }
  return {};
}

Status Socket::ReceiveSecurely(std::span<std::byte> out, Deadline deadline) {
  while (!out.empty()) {
    PREFIXD_ASSIGN(const TlsStep step, tls_->Read(out));
    out = out.subspan(step.bytes);
    if (step.wants != 0) PREFIXD_TRY(Wait(step.wants, deadline));
  }
  return {};
}

Result<bool> Socket::Readable(Clock::time_point until) {
  while (true) {
    // A record of TLS may have come already, or only a part of one.
    if (tls_) {
      PREFIXD_ASSIGN(const TlsStep step, tls_->Peek());
      if (step.wants == 0) return true;
    }
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(until - Clock::now()).count();
    pollfd p{fd_, POLLIN, 0};
    const int rc = ::poll(&p, 1, static_cast<int>(std::clamp<int64_t>(left + 1, 0, 1 << 30)));
    if (rc == 0 || (rc > 0 && !tls_)) return rc > 0;
    if (rc < 0 && errno != EINTR) return Unavailable("poll", errno);
  }
}

Status Socket::Send(std::span<const std::span<const std::byte>> parts, Deadline deadline) {
  if (tls_) {
    // Small parts go together: each record is a message of its own on the wire.
    std::vector<std::byte> together;
    for (const auto& part : parts) {
      if (together.size() + part.size() <= kTogetherBytes) {
        together.insert(together.end(), part.begin(), part.end());
        continue;
      }
      PREFIXD_TRY(SendSecurely(together, deadline));
      together.clear();
      PREFIXD_TRY(SendSecurely(part, deadline));
    }
    return SendSecurely(together, deadline);
  }
  std::vector<iovec> iov;
  iov.reserve(parts.size());
  for (const auto& part : parts) {
    if (!part.empty()) iov.push_back({const_cast<std::byte*>(part.data()), part.size()});
  }
  size_t first = 0;
  while (first < iov.size()) {
    msghdr message{};
    message.msg_iov = &iov[first];
    message.msg_iovlen = std::min<size_t>(iov.size() - first, 64);
    const ssize_t sent = ::sendmsg(fd_, &message, MSG_NOSIGNAL);
    if (sent < 0) {
      if (errno == EINTR) continue;
      if (errno != EAGAIN && errno != EWOULDBLOCK) {
        return Unavailable("the daemon closed the connection", errno);
      }
      PREFIXD_TRY(Wait(POLLOUT, deadline));
      continue;
    }
    for (size_t left = static_cast<size_t>(sent); left > 0 && first < iov.size();) {
      const size_t n = std::min(left, iov[first].iov_len);
      iov[first].iov_base = static_cast<std::byte*>(iov[first].iov_base) + n;
      iov[first].iov_len -= n;
      left -= n;
      if (iov[first].iov_len == 0) ++first;
    }
  }
  return {};
}

Status Socket::Receive(std::span<std::byte> out, Deadline deadline) {
  Descriptors unexpected;
  return ReceiveWith(out, deadline, &unexpected);
}

Status Socket::ReceiveWith(std::span<std::byte> out, Deadline deadline, Descriptors* descriptors) {
  if (tls_) return ReceiveSecurely(out, deadline);
  while (!out.empty()) {
    iovec iov{out.data(), out.size()};
    alignas(cmsghdr) std::array<char, CMSG_SPACE(Descriptors::kMost * sizeof(int))> control{};
    msghdr message{};
    message.msg_iov = &iov;
    message.msg_iovlen = 1;
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    const ssize_t n = ::recvmsg(fd_, &message, MSG_CMSG_CLOEXEC);
    if (n < 0) {
      if (errno == EINTR) continue;
      if (errno != EAGAIN && errno != EWOULDBLOCK) {
        return Unavailable("the connection to the daemon broke", errno);
      }
      PREFIXD_TRY(Wait(POLLIN, deadline));
      continue;
    }
    for (cmsghdr* c = CMSG_FIRSTHDR(&message); c != nullptr; c = CMSG_NXTHDR(&message, c)) {
      if (c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS) {
        std::array<int, Descriptors::kMost> fds;
        const size_t came = std::min((c->cmsg_len - CMSG_LEN(0)) / sizeof(int), fds.size());
        std::memcpy(fds.data(), CMSG_DATA(c), came * sizeof(int));
        descriptors->Add(std::span(fds).first(came));
      }
    }
    if (n == 0) return Unavailable("the daemon closed the connection", 0);
    out = out.subspan(static_cast<size_t>(n));
  }
  return {};
}

}  // namespace prefixd
