// Decides who may read what over HTTP: by the address that the daemon listens on, the field Host
// and a token.
//
// Thread-safety: one thread at a time.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <variant>

#include "daemon/access/access.h"
#include "daemon/access/token.h"
#include "daemon/http/message.h"
#include "daemon/watch/status.h"
#include "prefixd/result.h"

namespace prefixd::daemon {

// Whether an address, or a field Host without its port, names this machine to itself alone.
bool IsLoopback(std::string_view host);
// "localhost:9460" is "localhost", "[::1]:9460" is "::1"; "" where there is no such form.
std::string HostWithoutPort(std::string_view host);

// Reads the token of http.token_file: its first line. kFailedPrecondition: others than its owner
// may read or write it; kInvalidArgument: the token is shorter than 16 characters.
Result<TokenHash> ReadHttpToken(const std::string& file);

class HttpReaders {
 public:
  // loopback: of the address that is listened on. access must outlive this object; `tokens`:
  // whether its tokens are read from a file.
  HttpReaders(bool loopback, std::optional<TokenHash> token, const Access& access, bool tokens)
      : loopback_(loopback), token_(token), access_(access), tokens_(tokens) {}

  void Replace(std::optional<TokenHash> token) { token_ = token; }
  // What the request may see, or the answer that refuses it. A wrong token is always refused.
  std::variant<Viewer, HttpAnswer> Admit(const HttpRequest& request) const;

 private:
  const bool loopback_;
  std::optional<TokenHash> token_;
  const Access& access_;
  const bool tokens_;
};

// The answer that makes a browser ask for a token, as a password.
HttpAnswer AskForToken(std::string_view why);

}  // namespace prefixd::daemon
