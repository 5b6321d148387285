#include "prefixctl/commands/token.h"

#include <cstdio>
#include <vector>

#include "daemon/access/token.h"
#include "daemon/access/token_file.h"
#include "prefixctl/show/output.h"

namespace prefixd::ctl {

using daemon::AccessTable;
using daemon::TokenGrant;
using daemon::UserGrant;

Status NewToken(const Options& options) {
  TokenGrant entry;
  entry.grant.tenant = options.name;
  entry.name = options.label;
  if (options.name.size() > daemon::kMaxTenantBytes) {
    return InvalidArgument("the tenant's name is longer than 256 bytes");
  }
  PREFIXD_TRY(daemon::SetRights(options.rights, &entry.grant));
  const std::string token = daemon::MakeToken();
  entry.hash = daemon::HashToken(token);
  if (!options.file.empty()) PREFIXD_TRY(daemon::AppendToken(options.file, entry));
  const std::string lines = daemon::TokenLines(entry);
  if (options.json) {
    PrintJson({{"token", token},
               {"tenant", entry.grant.tenant},
               {"hash", daemon::HashText(entry.hash)},
               {"lines", lines}});
  } else if (options.file.empty()) {
    std::printf("# The token, for the client; it cannot be shown again:\n%s\n\n", token.c_str());
    std::printf("# For the daemon's file auth.tokens; then send the daemon SIGHUP:%s",
                lines.c_str());
  } else {
    std::printf("%s\n", token.c_str());
    std::fprintf(stderr, "%s has its hash; send the daemon SIGHUP. It cannot be shown again.\n",
                 Printable(options.file).c_str());
  }
  return {};
}

Status CheckTokens(const Options& options) {
  PREFIXD_ASSIGN(const AccessTable table, daemon::ReadTokens(options.file, daemon::Who::kOperator));
  if (options.json) {
    nlohmann::json tokens = nlohmann::json::array(), users = nlohmann::json::array();
    for (const TokenGrant& t : table.tokens) {
      tokens.push_back({{"tenant", t.grant.tenant},
                        {"name", t.name},
                        {"rights", daemon::RightsText(t.grant)},
                        {"hash", daemon::HashText(t.hash)}});
    }
    for (const UserGrant& u : table.users) {
      users.push_back(
          {{"user", u.user}, {"tenant", u.grant.tenant}, {"rights", daemon::RightsText(u.grant)}});
    }
    PrintJson({{"tokens", std::move(tokens)}, {"users", std::move(users)}});
    return {};
  }
  std::vector<std::vector<std::string>> rows = {{"tenant", "who", "name", "rights"}};
  for (const TokenGrant& t : table.tokens) {
    const std::string hash = daemon::HashText(t.hash);
    rows.push_back({t.grant.tenant, hash.substr(0, hash.find(':') + 9) + "...", t.name,
                    daemon::RightsText(t.grant)});
  }
  for (const UserGrant& u : table.users) {
    rows.push_back(
        {u.grant.tenant, "user " + std::to_string(u.user), "", daemon::RightsText(u.grant)});
  }
  PrintTable(rows);
  return {};
}

}  // namespace prefixd::ctl
