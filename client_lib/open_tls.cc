// TLS lies in a library that is loaded here, so that clients of a local daemon load no OpenSSL.
#include "client_lib/open_tls.h"

#include <cstdlib>
#include <string>

#include "client_lib/load_library.h"
#include "protocol/tls_channel.h"

namespace prefixd {
namespace {

std::string Authority(const ConnectOptions& options) {
  if (!options.tls_ca.empty()) return options.tls_ca;
  const char* const named = ::secure_getenv("PREFIXD_TLS_CA");
  return named ? named : "";
}

}  // namespace

Status StartTls(const Address& address, const ConnectOptions& options, Socket::Deadline deadline,
                Socket* socket) {
  static const auto entry =
      LoadEntry<TlsEntry>(kTlsLibrary, kTlsSymbol, [](const std::string& why) {
        return Error{Code::kFailedPrecondition, "an address that begins with tls: needs " +
                                                    std::string(kTlsLibrary) + " (" + why +
                                                    "); install it beside this library"};
      });
  if (!entry.ok()) return entry.error();
  const TlsPeer peer{address.host, Authority(options), options.tls_certificate, options.tls_key};
  PREFIXD_ASSIGN(auto channel, (*entry)->make(socket->descriptor(), peer));
  return socket->Secure(std::move(channel), deadline);
}

}  // namespace prefixd
