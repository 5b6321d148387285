// TLS of a client, on OpenSSL (docs/decisions/044-tls-is-loaded.md). All of libprefixd-tls.so,
// which exports one function.
#include "protocol/tls_channel.h"

#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <utility>

namespace prefixd {
namespace {

template <auto Free>
struct Freed {
  template <typename T>
  void operator()(T* object) const {
    Free(object);
  }
};
using Context = std::unique_ptr<SSL_CTX, Freed<SSL_CTX_free>>;
using Ssl = std::unique_ptr<SSL, Freed<SSL_free>>;
using Method = std::unique_ptr<BIO_METHOD, Freed<BIO_meth_free>>;

int SocketOf(BIO* bio) { return static_cast<int>(reinterpret_cast<intptr_t>(BIO_get_data(bio))); }

bool TryAgain() { return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR; }

// OpenSSL's own sockets raise SIGPIPE, which a library must not do to its process.
int SendSome(BIO* bio, const char* bytes, int n) {
  BIO_clear_retry_flags(bio);
  const ssize_t sent = ::send(SocketOf(bio), bytes, static_cast<size_t>(n), MSG_NOSIGNAL);
  if (sent < 0 && TryAgain()) BIO_set_retry_write(bio);
  return static_cast<int>(sent);
}

int ReceiveSome(BIO* bio, char* bytes, int n) {
  BIO_clear_retry_flags(bio);
  const ssize_t got = ::recv(SocketOf(bio), bytes, static_cast<size_t>(n), 0);
  if (got < 0 && TryAgain()) BIO_set_retry_read(bio);
  return static_cast<int>(got);
}

long Control(BIO*, int command, long, void*) { return command == BIO_CTRL_FLUSH ? 1 : 0; }

BIO* MakeBio(int socket) {
  static const Method method = [] {
    Method made(BIO_meth_new(BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "prefixd socket"));
    BIO_meth_set_write(made.get(), SendSome);
    BIO_meth_set_read(made.get(), ReceiveSome);
    BIO_meth_set_ctrl(made.get(), Control);
    return made;
  }();
  BIO* const bio = BIO_new(method.get());
  if (bio == nullptr) return nullptr;
  BIO_set_data(bio, reinterpret_cast<void*>(static_cast<intptr_t>(socket)));
  BIO_set_init(bio, 1);
  return bio;
}

// Takes the oldest error of this thread, and forgets the others.
unsigned long TakeError() {
  const unsigned long error = ERR_get_error();
  ERR_clear_error();
  return error;
}

std::string Reason(unsigned long error) {
  const char* const reason = ERR_reason_error_string(error);
  return reason ? reason : "error " + std::to_string(error);
}

Error CannotUse(const char* what, const std::string& file) {
  return InvalidArgument("cannot use " + std::string(what) + " " + file + ": " +
                         Reason(TakeError()));
}

class Channel final : public TlsChannel {
 public:
  Channel(Context context, Ssl ssl, TlsPeer peer)
      : context_(std::move(context)), ssl_(std::move(ssl)), peer_(std::move(peer)) {}
  ~Channel() override {
    if (connected_) SSL_shutdown(ssl_.get());
    ERR_clear_error();
  }

  Result<TlsStep> Handshake() override {
    ForgetErrors();
    const int rc = SSL_connect(ssl_.get());
    connected_ = rc == 1;
    return Outcome(rc, 0);
  }
  Result<TlsStep> Read(std::span<std::byte> out) override {
    if (peeked_) return *peeked_;
    ForgetErrors();
    size_t bytes = 0;
    const int rc = SSL_read_ex(ssl_.get(), out.data(), out.size(), &bytes);
    return Outcome(rc, bytes);
  }
  Result<TlsStep> Write(std::span<const std::byte> bytes) override {
    ForgetErrors();
    size_t written = 0;
    const int rc = SSL_write_ex(ssl_.get(), bytes.data(), bytes.size(), &written);
    return Outcome(rc, written);
  }
  Result<TlsStep> Peek() override {
    if (peeked_) return TlsStep{};
    ForgetErrors();
    std::byte first;
    size_t bytes = 0;
    const int rc = SSL_peek_ex(ssl_.get(), &first, 1, &bytes);
    auto step = Outcome(rc, bytes);
    if (step.ok()) return step;
    peeked_ = step.error();  // OpenSSL would not say it again
    return TlsStep{};
  }

 private:
  // SSL_get_error takes any error of this thread for one of this connection, also one that other
  // users of OpenSSL in this process have left.
  static void ForgetErrors() {
    ERR_clear_error();
    errno = 0;
  }

  Result<TlsStep> Outcome(int rc, size_t bytes) {
    if (rc == 1) return TlsStep{bytes, 0};
    const int broken = errno;
    switch (SSL_get_error(ssl_.get(), rc)) {
      case SSL_ERROR_WANT_READ:
        return TlsStep{0, POLLIN};
      case SSL_ERROR_WANT_WRITE:
        return TlsStep{0, POLLOUT};
      case SSL_ERROR_SSL:
        connected_ = false;  // nothing may be sent any more
        return Refusal(TakeError());
      case SSL_ERROR_ZERO_RETURN:
        return Gone("the daemon closed the connection");
      default:
        connected_ = false;
        ERR_clear_error();
        return Gone("the connection to the daemon broke" +
                    (broken ? std::string(": ") + std::strerror(broken) : std::string()));
    }
  }

  Error Gone(const std::string& what) const {
    if (SSL_is_init_finished(ssl_.get())) return {Code::kUnavailable, what};
    return {Code::kUnavailable, what + " during the TLS handshake; if the daemon at " + peer_.host +
                                    " has no tls.certificate, its address begins with tcp:"};
  }

  Error Refusal(unsigned long error) const {
    const int reason = ERR_GET_REASON(error);
    if (reason == SSL_R_UNEXPECTED_EOF_WHILE_READING) {
      return Gone("the daemon closed the connection");
    }
    const auto refused = [](std::string why) {
      return Error{Code::kFailedPrecondition, std::move(why)};
    };
    if (reason == SSL_R_WRONG_VERSION_NUMBER) {
      return refused("what answers at " + peer_.host +
                     " speaks no TLS: a daemon without tls.certificate has an address that begins "
                     "with tcp:");
    }
    if (reason == SSL_R_CERTIFICATE_VERIFY_FAILED) {
      const long why = SSL_get_verify_result(ssl_.get());
      return refused("the certificate of the daemon at " + peer_.host + " is not accepted: " +
                     X509_verify_cert_error_string(why) + " (" + Trusted() + ")");
    }
    if (reason == SSL_R_TLSV13_ALERT_CERTIFICATE_REQUIRED ||
        reason == SSL_R_SSLV3_ALERT_HANDSHAKE_FAILURE || reason == SSL_R_TLSV1_ALERT_UNKNOWN_CA ||
        reason == SSL_R_SSLV3_ALERT_BAD_CERTIFICATE) {
      return refused(
          "the daemon refuses this client's certificate, or asks for one "
          "(tls.client_ca): " +
          Reason(error) + "; give tls_certificate and tls_key");
    }
    return {SSL_is_init_finished(ssl_.get()) ? Code::kUnavailable : Code::kFailedPrecondition,
            "TLS: " + Reason(error)};
  }

  std::string Trusted() const {
    return peer_.ca.empty() ? "trusted are the system's authorities; name another with tls_ca or "
                              "PREFIXD_TLS_CA"
                            : "trusted is tls_ca " + peer_.ca;
  }

  const Context context_;
  const Ssl ssl_;
  const TlsPeer peer_;
  bool connected_ = false;
  std::optional<Error> peeked_;  // what Peek found, for Read
};

Status UseFiles(SSL_CTX* context, const TlsPeer& peer) {
  const bool trusts = peer.ca.empty() ? SSL_CTX_set_default_verify_paths(context) == 1
                                      : SSL_CTX_load_verify_file(context, peer.ca.c_str()) == 1;
  if (!trusts) return CannotUse("tls_ca", peer.ca);
  if (peer.certificate.empty() != peer.key.empty()) {
    return InvalidArgument("tls_certificate and tls_key go together");
  }
  if (peer.certificate.empty()) return {};
  if (SSL_CTX_use_certificate_chain_file(context, peer.certificate.c_str()) != 1) {
    return CannotUse("tls_certificate", peer.certificate);
  }
  if (SSL_CTX_use_PrivateKey_file(context, peer.key.c_str(), SSL_FILETYPE_PEM) != 1) {
    return CannotUse("tls_key", peer.key);
  }
  return {};
}

bool ExpectHost(SSL* ssl, const std::string& host) {
  X509_VERIFY_PARAM* const expected = SSL_get0_param(ssl);
  X509_VERIFY_PARAM_set_hostflags(expected, X509_CHECK_FLAG_NO_PARTIAL_WILDCARDS);
  if (X509_VERIFY_PARAM_set1_ip_asc(expected, host.c_str()) == 1) return true;
  ERR_clear_error();
  return SSL_set1_host(ssl, host.c_str()) == 1 && SSL_set_tlsext_host_name(ssl, host.c_str()) == 1;
}

int NoPassword(char*, int, int, void*) { return -1; }  // nobody may be asked for one

Result<std::unique_ptr<TlsChannel>> Make(int socket, const TlsPeer& peer) {
  ERR_clear_error();
  Context context(SSL_CTX_new(TLS_client_method()));
  if (!context) return Error{Code::kInternal, "TLS: " + Reason(TakeError())};
  SSL_CTX_set_min_proto_version(context.get(), TLS1_2_VERSION);
  SSL_CTX_set_verify(context.get(), SSL_VERIFY_PEER, nullptr);
  SSL_CTX_set_mode(context.get(),
                   SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
  SSL_CTX_set_default_passwd_cb(context.get(), NoPassword);
  PREFIXD_TRY(UseFiles(context.get(), peer));
  Ssl ssl(SSL_new(context.get()));
  BIO* const bio = ssl ? MakeBio(socket) : nullptr;
  if (bio == nullptr) return Error{Code::kInternal, "TLS: " + Reason(TakeError())};
  SSL_set_bio(ssl.get(), bio, bio);
  if (!ExpectHost(ssl.get(), peer.host)) {
    return InvalidArgument("'" + peer.host + "' is no name that a certificate could bear");
  }
  return std::unique_ptr<TlsChannel>(
      std::make_unique<Channel>(std::move(context), std::move(ssl), peer));
}

}  // namespace
}  // namespace prefixd

const prefixd::TlsEntry* prefixd_tls_entry() {
  static constexpr prefixd::TlsEntry entry = {PREFIXD_VERSION, prefixd::Make};
  return &entry;
}
