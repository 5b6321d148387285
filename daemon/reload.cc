#include "daemon/reload.h"

#include <spdlog/spdlog.h>

#include <string>

#include "base/capture_errors.h"
#include "daemon/http/readers.h"

namespace prefixd::daemon {

Status ReadAgain(const Config& config, bool with_http, ReloadedFiles* files) {
  return CaptureErrors([&]() -> Status {
    files->tokens = Access::Load(config.tokens_file);
    files->tls = LoadTls(TlsFilesOf(config));
    if (with_http && !config.http_token_file.empty()) {
      files->http_token = ReadHttpToken(config.http_token_file);
    }
    return {};
  });
}

bool PutIntoForce(const ReloadedFiles& files, ServerContext& context, HttpServer* http) {
  const Config& config = context.config;
  const auto kept = [](const Error& error) {
    spdlog::error("SIGHUP: what was read before stays in force: {}", error.message);
  };
  if (!files.tls.ok()) {
    kept(files.tls.error());
  } else if (*files.tls) {
    context.tls = *files.tls;
    spdlog::info("SIGHUP: new connections see the certificate {}", config.tls_certificate);
  }
  if (http != nullptr && files.http_token) {
    if (files.http_token->ok()) {
      http->Replace(**files.http_token);
      spdlog::info("SIGHUP: the token of HTTP was read again from {}", config.http_token_file);
    } else {
      kept(files.http_token->error());
    }
  }
  if (!files.tokens.ok()) {
    kept(files.tokens.error());
    return false;
  }
  context.access.Replace(*files.tokens);
  spdlog::info("SIGHUP: {}", *files.tokens
                                 ? "tokens were read again from " + config.tokens_file
                                 : std::string("there is no file auth.tokens to read again"));
  return true;
}

}  // namespace prefixd::daemon
