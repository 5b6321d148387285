// Reads the files that the daemon speaks TLS by: its certificate, its key, and who may have signed
// the clients' certificates.
//
// Thread-safety: free functions. A context that was made is not changed any more.
#pragma once

#include <boost/asio/ssl/context.hpp>
#include <memory>
#include <string>

#include "daemon/settings/config.h"
#include "prefixd/result.h"

namespace prefixd::daemon {

struct TlsFiles {
  std::string certificate;  // with those between it and the authority's; "": no TLS
  std::string key;
  std::string client_ca;  // "": clients are not asked for a certificate
};

TlsFiles TlsFilesOf(const Config& config);

// What the connections of one reading of the files share.
using TlsContext = std::shared_ptr<boost::asio::ssl::context>;

// Null where there is no certificate. kFailedPrecondition: a file that cannot be read or does not
// hold what it should, a key of another certificate, or one that everybody may read.
Result<TlsContext> LoadTls(const TlsFiles& files);

}  // namespace prefixd::daemon
