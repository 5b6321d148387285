#include "tests/support/certificates.h"

#include <fcntl.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509v3.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <utility>

namespace prefixd::testing {
namespace {

template <auto Free>
struct Freed {
  template <typename T>
  void operator()(T* object) const {
    Free(object);
  }
};
using Key = std::unique_ptr<EVP_PKEY, Freed<EVP_PKEY_free>>;
using Certificate = std::unique_ptr<X509, Freed<X509_free>>;

void Must(bool done, const char* what) {
  if (done) return;
  std::fprintf(stderr, "certificates: %s failed\n", what);
  std::abort();
}

void Extend(X509* certificate, X509* issuer, int kind, const std::string& value) {
  X509V3_CTX context;
  X509V3_set_ctx(&context, issuer, certificate, nullptr, nullptr, 0);
  X509_EXTENSION* const extension = X509V3_EXT_conf_nid(nullptr, &context, kind, value.c_str());
  Must(extension && X509_add_ext(certificate, extension, -1) == 1, value.c_str());
  X509_EXTENSION_free(extension);
}

Certificate Begin(const std::string& name, EVP_PKEY* key, int days) {
  static long serial = 1;
  Certificate made(X509_new());
  X509_set_version(made.get(), 2);
  ASN1_INTEGER_set(X509_get_serialNumber(made.get()), serial++);
  X509_gmtime_adj(X509_getm_notBefore(made.get()), -2 * 86400);
  X509_gmtime_adj(X509_getm_notAfter(made.get()), days * 86400L);
  X509_set_pubkey(made.get(), key);
  X509_NAME_add_entry_by_txt(X509_get_subject_name(made.get()), "CN", MBSTRING_UTF8,
                             reinterpret_cast<const unsigned char*>(name.c_str()), -1, -1, 0);
  return made;
}

template <typename Write>
void WritePem(const std::filesystem::path& file, mode_t mode, const Write& write) {
  const int fd = ::open(file.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, mode);
  FILE* const out = fd < 0 ? nullptr : ::fdopen(fd, "w");
  Must(out && write(out) == 1 && std::fclose(out) == 0, file.c_str());
}

void WriteCertificate(const std::filesystem::path& file, X509* certificate) {
  WritePem(file, 0644, [&](FILE* out) { return PEM_write_X509(out, certificate); });
}

}  // namespace

struct Authority::Keys {
  Key key;
  Certificate certificate;
};

Authority::Authority(std::filesystem::path dir, const std::string& name)
    : dir_(std::move(dir)), name_(name), keys_(std::make_unique<Keys>()) {
  keys_->key.reset(EVP_EC_gen("P-256"));
  keys_->certificate = Begin(name, keys_->key.get(), 2);
  X509* const own = keys_->certificate.get();
  X509_set_issuer_name(own, X509_get_subject_name(own));
  Extend(own, own, NID_basic_constraints, "critical,CA:TRUE");
  Extend(own, own, NID_key_usage, "critical,keyCertSign,cRLSign");
  Extend(own, own, NID_subject_key_identifier, "hash");
  Must(X509_sign(own, keys_->key.get(), EVP_sha256()) > 0, "signing");
  WriteCertificate(ca(), own);
}

Authority::~Authority() = default;

void Authority::Issue(const std::string& name, const std::string& for_names, int days) const {
  const Key key(EVP_EC_gen("P-256"));
  const Certificate made = Begin(name, key.get(), days);
  X509* const issuer = keys_->certificate.get();
  X509_set_issuer_name(made.get(), X509_get_subject_name(issuer));
  Extend(made.get(), issuer, NID_basic_constraints, "critical,CA:FALSE");
  Extend(made.get(), issuer, NID_subject_alt_name, for_names);
  Extend(made.get(), issuer, NID_authority_key_identifier, "keyid");
  Must(X509_sign(made.get(), keys_->key.get(), EVP_sha256()) > 0, "signing");
  WriteCertificate(certificate(name), made.get());
  WritePem(this->key(name), 0600, [&](FILE* out) {
    return PEM_write_PrivateKey(out, key.get(), nullptr, nullptr, 0, nullptr, nullptr);
  });
}

}  // namespace prefixd::testing
