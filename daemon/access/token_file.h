// Reads the file that says who may do what (auth.tokens; docs/security.md):
//
//   [[tokens]]
//   tenant = "team-a"
//   name = "2026-11"                # for the log
//   hash = "blake2b:0123..."        # of the token, which stands nowhere
//   rights = ["read", "write"]      # and "admin"; these two without it
//
//   [[users]]                       # who comes over the Unix socket
//   user = "engine"                 # a name or a number
//   tenant = "team-a"
//
// Thread-safety: plain values and free functions.
#pragma once

#include <sys/types.h>

#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "daemon/access/token.h"
#include "prefixd/result.h"

namespace prefixd::daemon {

inline constexpr size_t kMaxTenantBytes = 256;

// What a client may do, and for whom.
struct Grant {
  std::string tenant;
  bool read = true, write = true;
  bool admin = false;  // for every tenant
  bool operator==(const Grant&) const = default;
};

struct TokenGrant {
  TokenHash hash{};
  std::string name;
  Grant grant;
};
struct UserGrant {
  uid_t user = 0;
  Grant grant;
};

struct AccessTable {
  std::vector<TokenGrant> tokens;
  std::vector<UserGrant> users;  // one user may have several tenants; the first is its own

  // Null: there is none. Looks at all of them, so that the time does not tell which it was.
  const TokenGrant* Find(const TokenHash& hash) const;
  // The user's grant for `tenant`; "": the first of the user.
  const UserGrant* Find(uid_t user, std::string_view tenant) const;
};

// Returns the number of the user of this name, or nothing.
using FindUser = std::function<std::optional<uid_t>(const std::string& name)>;
// Asks this machine's list of users (getpwnam_r).
std::optional<uid_t> FindSystemUser(const std::string& name);

// Parses the file's text. kInvalidArgument names file, line and what is wrong; `file` is its name.
Result<AccessTable> ParseTokens(std::string_view text, const std::string& file,
                                const FindUser& find_user = FindSystemUser);
// Who reads the file: the daemon, or an operator, who as root looks after that of any user.
enum class Who : uint8_t { kDaemon, kOperator };
// Reads and parses it. kFailedPrecondition: somebody else than its owner may read or write it, or
// the owner is neither this process's user nor root (nor, for root as an operator, anybody);
// kIo: it cannot be read.
Result<AccessTable> ReadTokens(const std::filesystem::path& file, Who who = Who::kDaemon);

// Returns the lines of a token for the file, with an empty line before them.
std::string TokenLines(const TokenGrant& token);
// Appends them to the file, which is made if it does not exist.
Status AppendToken(const std::filesystem::path& file, const TokenGrant& token);

// "read", "write" and "admin", divided by commas.
Status SetRights(std::string_view text, Grant* grant);
std::string RightsText(const Grant& grant);

}  // namespace prefixd::daemon
