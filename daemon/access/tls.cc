#include "daemon/access/tls.h"

#include <openssl/err.h>
#include <openssl/ssl.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>
#include <utility>

namespace prefixd::daemon {
namespace {

namespace ssl = boost::asio::ssl;

Error CannotUse(const char* option, const std::string& file, const std::string& why) {
  return {Code::kFailedPrecondition,
          "cannot use " + std::string(option) + " = " + file + ": " + why};
}

Error CannotUse(const char* option, const std::string& file) {
  const char* const reason = ERR_reason_error_string(ERR_get_error());
  ERR_clear_error();
  return CannotUse(option, file, reason ? reason : "it is no PEM file");
}

// OpenSSL's errors say little of files that are not there.
Status CheckFile(const char* option, const std::string& file, bool secret) {
  struct stat st {};
  if (::stat(file.c_str(), &st) != 0) return CannotUse(option, file, std::strerror(errno));
  if (!S_ISREG(st.st_mode)) return CannotUse(option, file, "it is no file");
  if (secret && (st.st_mode & 07) != 0) {
    return CannotUse(
        option, file,
        "everybody may read or change it, and speak in the daemon's name: chmod o= " + file);
  }
  return {};
}

int NoPassword(char*, int, int, void*) { return -1; }  // nobody is there to type one

Status Use(const TlsFiles& files, SSL_CTX* context) {
  PREFIXD_TRY(CheckFile("tls.certificate", files.certificate, false));
  PREFIXD_TRY(CheckFile("tls.key", files.key, true));
  if (SSL_CTX_use_certificate_chain_file(context, files.certificate.c_str()) != 1) {
    return CannotUse("tls.certificate", files.certificate);
  }
  if (SSL_CTX_use_PrivateKey_file(context, files.key.c_str(), SSL_FILETYPE_PEM) != 1 ||
      SSL_CTX_check_private_key(context) != 1) {
    return CannotUse("tls.key", files.key);
  }
  if (files.client_ca.empty()) return {};
  PREFIXD_TRY(CheckFile("tls.client_ca", files.client_ca, false));
  STACK_OF(X509_NAME)* const names = SSL_load_client_CA_file(files.client_ca.c_str());
  if (names == nullptr || SSL_CTX_load_verify_file(context, files.client_ca.c_str()) != 1) {
    return CannotUse("tls.client_ca", files.client_ca);
  }
  SSL_CTX_set_client_CA_list(context, names);
  SSL_CTX_set_verify(context, SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT, nullptr);
  return {};
}

}  // namespace

TlsFiles TlsFilesOf(const Config& config) {
  return {config.tls_certificate, config.tls_key, config.tls_client_ca};
}

Result<TlsContext> LoadTls(const TlsFiles& files) {
  if (files.certificate.empty()) return TlsContext();
  ERR_clear_error();
  auto made = std::make_shared<ssl::context>(ssl::context::tls_server);
  SSL_CTX* const context = made->native_handle();
  SSL_CTX_set_min_proto_version(context, TLS1_2_VERSION);
  SSL_CTX_set_cipher_list(context, "ECDHE+AESGCM:ECDHE+CHACHA20");  // of TLS 1.2
  SSL_CTX_set_options(context, SSL_OP_NO_RENEGOTIATION | SSL_OP_CIPHER_SERVER_PREFERENCE |
                                   SSL_OP_PRIORITIZE_CHACHA);
  // Connections last long, so nothing is kept to resume them by.
  SSL_CTX_set_session_cache_mode(context, SSL_SESS_CACHE_OFF);
  SSL_CTX_set_options(context, SSL_OP_NO_TICKET);
  SSL_CTX_set_num_tickets(context, 0);
  SSL_CTX_set_default_passwd_cb(context, NoPassword);
  PREFIXD_TRY(Use(files, context));
  return made;
}

}  // namespace prefixd::daemon
