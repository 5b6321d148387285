// Reads the head of an HTTP request as it arrives, and writes answers. This is the door to
// Boost.Beast.
//
// Thread-safety: a RequestReader belongs to one thread; the functions may be called concurrently.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace prefixd::daemon {

inline constexpr size_t kMaxHttpHeadBytes = 8192;

struct HttpRequest {
  bool head = false;                 // HEAD: the same answer without its body; else GET
  std::string path;                  // begins with '/'; without what follows a '?'
  std::string host;                  // as it was sent
  std::optional<std::string> token;  // of Authorization: Bearer TOKEN, or Basic with any name
};

struct HttpAnswer {
  unsigned status = 200;
  std::string type = "text/plain; charset=utf-8";
  std::string body;
  std::vector<std::pair<std::string, std::string>> fields = {};  // further ones
};
// A plain text of one line.
HttpAnswer TextAnswer(unsigned status, std::string_view text);
// Every answer ends its connection, forbids caches, and is for pages of the same origin alone.
std::string WriteAnswer(const HttpAnswer& answer, bool head);

class RequestReader {
 public:
  RequestReader();
  ~RequestReader();
  RequestReader(RequestReader&&) noexcept;

  // Takes bytes as they came, until `done`. What follows the head is not read.
  void Take(std::string_view bytes);
  bool done() const { return done_; }
  // After that: what is asked, or the answer that refuses it.
  const std::optional<HttpRequest>& request() const { return request_; }
  const HttpAnswer& refusal() const { return refusal_; }

 private:
  struct Parser;
  void Refuse(unsigned status, std::string_view why);
  void Finish();

  std::unique_ptr<Parser> parser_;
  std::string bytes_;  // not parsed yet
  size_t taken_ = 0;
  bool done_ = false;
  std::optional<HttpRequest> request_;
  HttpAnswer refusal_;
};

}  // namespace prefixd::daemon
