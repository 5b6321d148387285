#include "daemon/access/token.h"

#include <sodium.h>

#include "base/check.h"

namespace prefixd::daemon {
namespace {

constexpr std::string_view kKey = "prefixd token v1";  // crypto_generichash takes 16 to 64 bytes
constexpr std::string_view kScheme = "blake2b:";
constexpr size_t kSecretBytes = 32;

void InitSodium() {
  static const int ready = ::sodium_init();  // idempotent and thread-safe
  PREFIXD_CHECK(ready >= 0, ready);          // < 0 only without entropy
}

}  // namespace

std::string MakeToken() {
  InitSodium();
  constexpr int kVariant = sodium_base64_VARIANT_URLSAFE_NO_PADDING;
  std::array<unsigned char, kSecretBytes> secret;
  ::randombytes_buf(secret.data(), secret.size());
  std::string text(sodium_base64_ENCODED_LEN(kSecretBytes, kVariant), '\0');
  ::sodium_bin2base64(text.data(), text.size(), secret.data(), secret.size(), kVariant);
  text.pop_back();  // the zero at its end
  return "pfx_" + text;
}

TokenHash HashToken(std::string_view token) {
  InitSodium();
  TokenHash hash;
  ::crypto_generichash(hash.data(), hash.size(),
                       reinterpret_cast<const unsigned char*>(token.data()), token.size(),
                       reinterpret_cast<const unsigned char*>(kKey.data()), kKey.size());
  return hash;
}

bool SameHash(const TokenHash& a, const TokenHash& b) {
  return ::sodium_memcmp(a.data(), b.data(), a.size()) == 0;
}

std::string HashText(const TokenHash& hash) {
  std::string hex(2 * hash.size() + 1, '\0');
  ::sodium_bin2hex(hex.data(), hex.size(), hash.data(), hash.size());
  hex.pop_back();
  return std::string(kScheme) + hex;
}

Result<TokenHash> ParseHash(std::string_view text) {
  TokenHash hash;
  size_t bytes = 0;
  const std::string_view hex =
      text.starts_with(kScheme) ? text.substr(kScheme.size()) : std::string_view();
  if (hex.size() != 2 * hash.size() ||
      ::sodium_hex2bin(hash.data(), hash.size(), hex.data(), hex.size(), nullptr, &bytes,
                       nullptr) != 0 ||
      bytes != hash.size()) {
    return InvalidArgument(
        "a hash is 'blake2b:' and 64 hexadecimal digits, as `prefixctl token new` writes it");
  }
  return hash;
}

}  // namespace prefixd::daemon
