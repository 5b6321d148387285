#include "daemon/access/access.h"

#include <unistd.h>

namespace prefixd::daemon {
namespace {

Error Refused(std::string why) { return {Code::kFailedPrecondition, std::move(why)}; }

// Who may speak for all tenants names any.
bool SpeaksFor(const Grant& grant, const std::string& tenant) {
  return tenant.empty() || tenant == grant.tenant || grant.admin;
}

}  // namespace

Result<Access::Table> Access::Load(const std::string& file) {
  if (file.empty()) return Table();
  PREFIXD_ASSIGN(AccessTable table, ReadTokens(file));
  return Table(std::make_shared<const AccessTable>(std::move(table)));
}

Result<Credential> Access::Admit(const wire::Hello& hello, std::optional<uid_t> user) const {
  if (hello.tenant.size() > kMaxTenantBytes) {
    return InvalidArgument("the tenant's name is longer than 256 bytes");
  }
  if (hello.token.size() > kMaxTokenBytes) {
    return InvalidArgument("the token is longer than 1024 bytes");
  }
  Credential c;
  c.user = user;
  c.own = user && (*user == ::geteuid() || *user == 0);
  // A token counts whoever presents it: the daemon's own user, too, means its tenant.
  if (table_ && !hello.token.empty()) {
    c.token = HashToken(hello.token);
    const TokenGrant* const found = table_->Find(*c.token);
    if (found == nullptr) return Refused("the token is not one that the daemon knows");
    c.grant = found->grant;
  } else if (c.own || !table_) {
    c.grant = {.tenant = hello.tenant, .admin = c.own};
  } else if (user) {
    const UserGrant* const found = table_->Find(*user, hello.tenant);
    if (found == nullptr) {
      return Refused("user " + std::to_string(*user) +
                     " has no such tenant by the daemon's file auth.tokens; present a token, or "
                     "have the user added under [[users]]");
    }
    c.grant = found->grant;
  } else {
    return Refused("the daemon asks TCP clients for a token; none was presented");
  }
  if (!SpeaksFor(c.grant, hello.tenant)) {
    return Refused("the token is for tenant '" + c.grant.tenant + "', not for '" + hello.tenant +
                   "'");
  }
  if (hello.admin && !c.grant.admin) {
    return Refused("access to all tenants is for the daemon's own user over its Unix socket" +
                   std::string(table_ ? ", and for tokens with the right 'admin'" : ""));
  }
  if (!hello.tenant.empty()) c.grant.tenant = hello.tenant;
  c.grant.admin = hello.admin;
  return c;
}

bool Access::Holds(const Credential& c) const {
  if (!table_ || (c.own && !c.token)) return true;
  const Grant* now = nullptr;
  if (c.token) {
    const TokenGrant* const found = table_->Find(*c.token);
    if (found) now = &found->grant;
  } else if (c.user) {
    const UserGrant* const found = table_->Find(*c.user, c.grant.tenant);
    if (found) now = &found->grant;
  }
  // The name without letters is a tenant's, too: here it names no other.
  const bool speaks = now != nullptr && (c.grant.tenant == now->tenant || now->admin);
  return speaks && now->read == c.grant.read && now->write == c.grant.write &&
         (now->admin || !c.grant.admin);
}

}  // namespace prefixd::daemon
