// Decides for whom a client speaks and what it may do, by its token or by its user.
//
// Thread-safety: the io thread alone uses it; Load may be called by any thread.
#pragma once

#include <sys/types.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "daemon/access/token_file.h"
#include "prefixd/result.h"
#include "protocol/codec.h"

namespace prefixd::daemon {

// How a client was admitted.
struct Credential {
  Grant grant;
  std::optional<TokenHash> token;
  std::optional<uid_t> user;  // of a local peer
  bool own = false;           // the daemon's own user, or root
};

class Access {
 public:
  using Table = std::shared_ptr<const AccessTable>;

  // Without a file: local peers that reach the socket, and TCP, speak for the tenant that they
  // name.
  Access() = default;
  explicit Access(Table table) : table_(std::move(table)) {}
  // Null where `file` is empty.
  static Result<Table> Load(const std::string& file);
  void Replace(Table table) { table_ = std::move(table); }

  // `user`: of a local peer; nullopt: it comes over TCP. The grant names the tenant of this
  // connection, and is one for all tenants if the client asked for that. kFailedPrecondition: a
  // missing or wrong token, or rights that it does not give.
  Result<Credential> Admit(const wire::Hello& hello, std::optional<uid_t> user) const;
  // Whether what a client was admitted by is as it was then.
  bool Holds(const Credential& credential) const;

 private:
  Table table_;
};

}  // namespace prefixd::daemon
