// Connects a client of the daemon: a blocking stream socket with deadlines.
//
// Thread-safety: one thread at a time; Interrupt and ended from any thread while no other closes
// the socket.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <memory>
#include <optional>
#include <span>

#include "prefixd/result.h"
#include "protocol/address.h"
#include "protocol/tls_channel.h"

namespace prefixd {

// Sets up one end of a TCP connection: small messages are sent at once, and a peer that vanished
// without closing is noticed within two minutes.
void SetTcpOptions(int fd);

// Owns descriptors that came with a message, in their order.
class Descriptors {
 public:
  Descriptors() = default;
  ~Descriptors();
  Descriptors(const Descriptors&) = delete;
  Descriptors& operator=(const Descriptors&) = delete;
  static constexpr size_t kMost = 3;  // of one message; the system closes further ones

  void Add(std::span<const int> fds);  // closes what is too many
  int Take();                          // the next one, then the caller's; -1: none is left

 private:
  std::array<int, kMost> fds_{};
  size_t first_ = 0, end_ = 0;
};

class Socket {
 public:
  using Clock = std::chrono::steady_clock;
  using Deadline = std::optional<Clock::time_point>;  // nullopt: wait forever

  Socket() = default;
  ~Socket();
  Socket(Socket&& other) noexcept;
  Socket& operator=(Socket&& other) noexcept;

  // kUnavailable when no daemon answers there, kNotFound when the host or socket does not exist.
  static Result<Socket> Connect(const Address& address, Deadline deadline);

  // Speaks TLS from here on. `channel` is over descriptor(). Errors are those of the handshake, and
  // kUnavailable when the deadline passes.
  Status Secure(std::unique_ptr<TlsChannel> channel, Deadline deadline);

  // Both transfer all bytes or fail: kUnavailable when the peer is gone or the deadline passes.
  Status Send(std::span<const std::span<const std::byte>> parts, Deadline deadline);
  Status Receive(std::span<std::byte> out, Deadline deadline);
  // Like Receive; adds descriptors that came along.
  Status ReceiveWith(std::span<std::byte> out, Deadline deadline, Descriptors* descriptors);
  // Waits until there is something to receive, or the peer is gone; false: not by `until`.
  Result<bool> Readable(Clock::time_point until);
  // Whether the other side, or Interrupt, has ended the connection; may be called beside transfers.
  bool ended() const;
  void Close();
  // Ends both directions: a transfer under way fails.
  void Interrupt();
  bool is_open() const { return fd_ >= 0; }
  int descriptor() const { return fd_; }

 private:
  Status Wait(short events, Deadline deadline);
  Status SendSecurely(std::span<const std::byte> bytes, Deadline deadline);
  Status ReceiveSecurely(std::span<std::byte> out, Deadline deadline);

  int fd_ = -1;
  std::unique_ptr<TlsChannel> tls_;  // null: plain
};

}  // namespace prefixd
