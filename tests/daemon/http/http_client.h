// Speaks HTTP to a daemon over plain sockets, as tests want it: byte by byte, wrong, or not at all.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <map>
#include <string>
#include <string_view>
#include <utility>

#include "tests/support/test.h"

namespace prefixd::testing {

struct HttpReply {
  int status = 0;                             // 0: there was no answer
  std::map<std::string, std::string> fields;  // by name in lower case
  std::string body;
};

inline HttpReply ParseReply(const std::string& bytes) {
  HttpReply reply;
  const size_t end = bytes.find("\r\n\r\n");
  if (!bytes.starts_with("HTTP/1.1 ") || end == std::string::npos) return reply;
  reply.status = std::atoi(bytes.c_str() + 9);
  for (size_t at = bytes.find("\r\n") + 2; at < end + 2;) {
    const size_t stop = bytes.find("\r\n", at), colon = bytes.find(": ", at);
    std::string name = bytes.substr(at, colon - at);
    std::ranges::transform(name, name.begin(), [](unsigned char c) { return std::tolower(c); });
    reply.fields[name] = bytes.substr(colon + 2, stop - colon - 2);
    at = stop + 2;
  }
  reply.body = bytes.substr(end + 4);
  return reply;
}

// One connection to 127.0.0.1. Move-only.
class HttpConnection {
 public:
  explicit HttpConnection(int port) : fd_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in to{};
    to.sin_family = AF_INET;
    to.sin_port = htons(static_cast<uint16_t>(port));
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    open_ = ::connect(fd_, reinterpret_cast<sockaddr*>(&to), sizeof(to)) == 0;
  }
  HttpConnection(HttpConnection&& other) noexcept
      : fd_(std::exchange(other.fd_, -1)), open_(other.open_) {}
  ~HttpConnection() {
    if (fd_ >= 0) ::close(fd_);
  }
  bool open() const { return open_; }
  // False: the daemon has closed it.
  bool Send(std::string_view bytes) {
    while (!bytes.empty()) {
      const ssize_t n = ::send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (n <= 0) return false;
      bytes.remove_prefix(static_cast<size_t>(n));
    }
    return true;
  }
  // Reads until the daemon closes, for `seconds` at most.
  std::string ReadAll(int seconds = 20) {
    std::string all;
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(seconds);
    while (std::chrono::steady_clock::now() < until) {
      pollfd p{fd_, POLLIN, 0};
      if (::poll(&p, 1, 100) <= 0) continue;
      char buffer[4096];
      const ssize_t n = ::recv(fd_, buffer, sizeof(buffer), 0);
      if (n <= 0) {
        closed_ = true;
        break;
      }
      all.append(buffer, static_cast<size_t>(n));
    }
    return all;
  }
  bool closed() const { return closed_; }  // seen by ReadAll

 private:
  int fd_ = -1;
  bool open_ = false, closed_ = false;
};

// Sends the bytes and returns the answer.
inline HttpReply Exchange(int port, std::string_view bytes) {
  HttpConnection connection(port);
  EXPECT_TRUE(connection.open());
  connection.Send(bytes);
  return ParseReply(connection.ReadAll());
}
// fields: further ones, each with its "\r\n".
inline HttpReply Get(int port, const std::string& path, const std::string& fields = "",
                     const std::string& method = "GET") {
  return Exchange(port, method + " " + path + " HTTP/1.1\r\nHost: localhost\r\n" + fields + "\r\n");
}
inline std::string Bearer(const std::string& token) {
  return "Authorization: Bearer " + token + "\r\n";
}

}  // namespace prefixd::testing
