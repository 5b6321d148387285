// Connects a client of the daemon: a blocking stream socket with deadlines.
//
// Thread-safety: one thread at a time; Interrupt from any thread while no other closes the socket.
#pragma once

#include <chrono>
#include <cstddef>
#include <optional>
#include <span>

#include "prefixd/result.h"
#include "protocol/address.h"

namespace prefixd {

// Sets up one end of a TCP connection: small messages are sent at once, and a peer that vanished
// without closing is noticed within two minutes.
void SetTcpOptions(int fd);

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

  // Both transfer all bytes or fail: kUnavailable when the peer is gone or the deadline passes.
  Status Send(std::span<const std::span<const std::byte>> parts, Deadline deadline);
  Status Receive(std::span<std::byte> out, Deadline deadline);
  // Like Receive; stores a descriptor that came along in *fd (owned by the caller), else -1.
  Status ReceiveWithFd(std::span<std::byte> out, Deadline deadline, int* fd);
  // Waits until there is something to receive, or the peer is gone; false: not by `until`.
  Result<bool> Readable(Clock::time_point until);
  void Close();
  // Ends both directions: a transfer under way fails.
  void Interrupt();
  bool is_open() const { return fd_ >= 0; }

 private:
  Status Wait(short events, Deadline deadline);

  int fd_ = -1;
};

}  // namespace prefixd
