// Reads again on SIGHUP what may change while a daemon runs: tokens, certificates, the token of
// HTTP.
#pragma once

#include <optional>

#include "daemon/access/access.h"
#include "daemon/access/tls.h"
#include "daemon/access/token.h"
#include "daemon/connections/server_context.h"
#include "daemon/http/http_server.h"
#include "daemon/settings/config.h"
#include "prefixd/result.h"

namespace prefixd::daemon {

// What was read. A file that cannot be used does not keep the others from taking effect.
struct ReloadedFiles {
  Result<Access::Table> tokens = Error{Code::kResourceExhausted, "out of memory"};
  Result<TlsContext> tls = Error{Code::kResourceExhausted, "out of memory"};
  std::optional<Result<TokenHash>>
      http_token;  // none: http.token_file is not set, or there is no HTTP
};

// Reads the files; any thread, but the disk may be slow. An error is the want of memory alone,
// those of files are in `files`.
Status ReadAgain(const Config& config, bool with_http, ReloadedFiles* files);

// Puts into force what could be read and logs what could not; the io thread. http: null without
// HTTP. True when there are new tokens, so that connections whose token is gone must end.
bool PutIntoForce(const ReloadedFiles& files, ServerContext& context, HttpServer* http);

}  // namespace prefixd::daemon
