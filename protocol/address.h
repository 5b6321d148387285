// Parses the address on which a daemon listens: "unix:/path", a plain path, "tcp:host:port", or
// "tls:host:port".
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "prefixd/result.h"

namespace prefixd {

// sockaddr_un holds 108 bytes with the terminating zero; the kernel takes no more.
inline constexpr size_t kMaxSocketPathBytes = 107;

struct Address {
  enum class Kind : uint8_t { kUnix, kTcp };
  Kind kind = Kind::kUnix;
  std::string path;   // kUnix
  std::string host;   // kTcp; an IPv6 address without its brackets
  uint16_t port = 0;  // kTcp; 0: a listener takes any free port
  bool tls = false;   // kTcp

  // kInvalidArgument: an empty or too long path, a missing or bad port.
  static Result<Address> Parse(std::string_view text);
  // Parses "host:port" or "[v6]:port", the form of the daemon's option listen.tcp.
  static Result<Address> ParseTcp(std::string_view host_port);
  std::string ToString() const;  // "unix:/path", "tcp:host:port" or "tls:host:port"
};

}  // namespace prefixd
