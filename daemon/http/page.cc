#include "daemon/http/page.h"

#include <sodium.h>

#include <array>
#include <string>
#include <string_view>

namespace prefixd::daemon {

extern const std::string_view kStatusPage;  // made from page.html

namespace {

// The source expression of an element's text: its hash, as Content-Security-Policy writes it.
std::string HashOf(std::string_view page, std::string_view element) {
  const std::string begin = "<" + std::string(element) + ">",
                    end = "</" + std::string(element) + ">";
  const size_t from = page.find(begin) + begin.size();
  const std::string_view text = page.substr(from, page.find(end, from) - from);
  std::array<unsigned char, crypto_hash_sha256_BYTES> hash;
  ::crypto_hash_sha256(hash.data(), reinterpret_cast<const unsigned char*>(text.data()),
                       text.size());
  constexpr int kVariant = sodium_base64_VARIANT_ORIGINAL;
  std::array<char, sodium_base64_ENCODED_LEN(crypto_hash_sha256_BYTES, kVariant)> base64;
  ::sodium_bin2base64(base64.data(), base64.size(), hash.data(), hash.size(), kVariant);
  return "'sha256-" + std::string(base64.data()) + "'";
}

}  // namespace

HttpAnswer StatusPage() {
  HttpAnswer answer;
  answer.type = "text/html; charset=utf-8";
  answer.body = kStatusPage;
  answer.fields.emplace_back("Content-Security-Policy",
                             "default-src 'none'; script-src " + HashOf(kStatusPage, "script") +
                                 "; style-src " + HashOf(kStatusPage, "style") +
                                 "; img-src data:; connect-src 'self'; base-uri 'none'; "
                                 "form-action 'none'; frame-ancestors 'none'");
  return answer;
}

}  // namespace prefixd::daemon
