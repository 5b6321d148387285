#include "daemon/http/message.h"

#include <sodium.h>

#include <boost/asio/buffer.hpp>
#include <boost/beast/http/empty_body.hpp>
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/write.hpp>
#include <sstream>

namespace prefixd::daemon {

namespace beast_http = boost::beast::http;

namespace {

constexpr std::string_view kNoBody = "a request has no body here";

std::string Text(boost::beast::string_view text) { return {text.data(), text.size()}; }

bool StartsWithWord(std::string_view text, std::string_view word) {
  return text.size() > word.size() &&
         boost::beast::iequals({text.data(), word.size()}, {word.data(), word.size()});
}

// The password of "Basic base64(name:password)".
std::optional<std::string> PasswordOf(std::string_view base64) {
  std::string text(base64.size(), '\0');
  size_t length = 0;
  const char* end = nullptr;
  if (::sodium_base642bin(reinterpret_cast<unsigned char*>(text.data()), text.size(), base64.data(),
                          base64.size(), nullptr, &length, &end,
                          sodium_base64_VARIANT_ORIGINAL) != 0 ||
      end != base64.data() + base64.size()) {
    return std::nullopt;
  }
  text.resize(length);
  const size_t colon = text.find(':');
  if (colon == std::string::npos) return std::nullopt;
  return text.substr(colon + 1);
}

}  // namespace

struct RequestReader::Parser : beast_http::request_parser<beast_http::empty_body> {
  Parser() {
    header_limit(kMaxHttpHeadBytes);
    body_limit(uint64_t{0});
  }
};

RequestReader::RequestReader() : parser_(std::make_unique<Parser>()) {}
RequestReader::~RequestReader() = default;
RequestReader::RequestReader(RequestReader&&) noexcept = default;

void RequestReader::Refuse(unsigned status, std::string_view why) {
  done_ = true;
  refusal_ = TextAnswer(status, why);
}

void RequestReader::Take(std::string_view bytes) {
  if (done_) return;
  taken_ += bytes.size();
  bytes_.append(bytes);
  boost::system::error_code ec;
  while (!bytes_.empty() && !parser_->is_header_done()) {
    const size_t used = parser_->put(boost::asio::buffer(bytes_), ec);
    bytes_.erase(0, used);
    if (ec || used == 0) break;
  }
  if (ec == beast_http::error::body_limit) return Refuse(413, kNoBody);
  if (parser_->is_header_done()) return Finish();
  if (ec == beast_http::error::header_limit || taken_ >= kMaxHttpHeadBytes) {
    return Refuse(431, "the request's head is larger than 8 KiB");
  }
  if (ec && ec != beast_http::error::need_more) {
    return Refuse(400, "this is no HTTP request: " + ec.message());
  }
}

void RequestReader::Finish() {
  const auto& message = parser_->get();
  if (message.method() != beast_http::verb::get && message.method() != beast_http::verb::head) {
    Refuse(405, "only GET and HEAD are answered here");
    refusal_.fields.emplace_back("Allow", "GET, HEAD");
    return;
  }
  if (message.version() != 10 && message.version() != 11) {
    return Refuse(505, "only HTTP/1.0 and HTTP/1.1 are spoken here");
  }
  if (parser_->chunked() || parser_->content_length().value_or(0) != 0) {
    return Refuse(413, kNoBody);
  }
  const std::string target = Text(message.target());
  if (!target.starts_with('/')) return Refuse(400, "the request's target must begin with '/'");
  if (message.count(beast_http::field::host) > 1 ||
      (message.version() == 11 && message.count(beast_http::field::host) == 0)) {
    return Refuse(400, "a request has one field Host");
  }
  if (message.count(beast_http::field::authorization) > 1) {
    return Refuse(400, "a request has one field Authorization at most");
  }
  HttpRequest request;
  request.head = message.method() == beast_http::verb::head;
  request.path = target.substr(0, target.find('?'));
  request.host = Text(message[beast_http::field::host]);
  const std::string authorization = Text(message[beast_http::field::authorization]);
  if (StartsWithWord(authorization, "Bearer ")) {
    request.token = authorization.substr(7);
  } else if (StartsWithWord(authorization, "Basic ")) {
    request.token = PasswordOf(std::string_view(authorization).substr(6));
    if (!request.token) return Refuse(400, "the field Authorization cannot be decoded");
  } else if (!authorization.empty()) {
    return Refuse(400, "Authorization takes Bearer TOKEN, or Basic with the token as password");
  }
  done_ = true;
  request_ = std::move(request);
}

HttpAnswer TextAnswer(unsigned status, std::string_view text) {
  HttpAnswer answer;
  answer.status = status;
  answer.body = std::string(text) + "\n";
  return answer;
}

std::string WriteAnswer(const HttpAnswer& answer, bool head) {
  beast_http::response<beast_http::empty_body> response(
      static_cast<beast_http::status>(answer.status), 11);
  response.set(beast_http::field::content_type, answer.type);
  response.set(beast_http::field::connection, "close");
  response.set(beast_http::field::cache_control, "no-store");
  response.set("X-Content-Type-Options", "nosniff");
  response.set("X-Frame-Options", "DENY");
  response.set("Referrer-Policy", "no-referrer");
  response.set("Cross-Origin-Resource-Policy", "same-origin");
  for (const auto& [name, value] : answer.fields) response.set(name, value);
  response.content_length(answer.body.size());  // with HEAD, too
  std::ostringstream out;
  out << response.base();
  if (!head) out << answer.body;
  return std::move(out).str();
}

}  // namespace prefixd::daemon
