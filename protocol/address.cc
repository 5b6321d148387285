#include "protocol/address.h"

#include <charconv>

namespace prefixd {
namespace {

Status CheckSocketPath(std::string_view path) {
  if (path.empty()) return InvalidArgument("the socket path is empty");
  if (path.find('\0') != std::string_view::npos) {
    return InvalidArgument("the socket path contains a zero byte");
  }
  if (path.size() > kMaxSocketPathBytes) {
    return InvalidArgument("socket path too long: " + std::to_string(path.size()) +
                           " bytes, the limit is " + std::to_string(kMaxSocketPathBytes) + ": '" +
                           std::string(path) + "'; choose a shorter one");
  }
  return {};
}

}  // namespace

Result<Address> Address::ParseTcp(std::string_view text) {
  const auto bad = [&] {
    return InvalidArgument("'" + std::string(text) +
                           "' is no TCP address; write host:port, for instance 127.0.0.1:7411");
  };
  const size_t colon = text.rfind(':');
  if (colon == std::string_view::npos || colon == 0) return bad();
  std::string_view host = text.substr(0, colon);
  if (host.front() == '[') {
    if (host.size() < 3 || host.back() != ']') return bad();
    host = host.substr(1, host.size() - 2);
  } else if (host.find(':') != std::string_view::npos) {
    return bad();
  }
  const std::string_view digits = text.substr(colon + 1);
  Address address;
  address.kind = Kind::kTcp;
  address.host = host;
  const auto [end, ec] =
      std::from_chars(digits.data(), digits.data() + digits.size(), address.port);
  if (ec != std::errc{} || end != digits.data() + digits.size()) return bad();
  return address;
}

Result<Address> Address::Parse(std::string_view text) {
  if (const bool tls = text.starts_with("tls:"); tls || text.starts_with("tcp:")) {
    text.remove_prefix(4);
    if (text.starts_with("//")) text.remove_prefix(2);
    PREFIXD_ASSIGN(Address address, ParseTcp(text));
    address.tls = tls;
    return address;
  }
  if (text.starts_with("unix:")) text.remove_prefix(5);
  PREFIXD_TRY(CheckSocketPath(text));
  Address address;
  address.path = text;
  return address;
}

std::string Address::ToString() const {
  if (kind == Kind::kUnix) return "unix:" + path;
  const bool v6 = host.find(':') != std::string::npos;
  return (tls ? "tls:" : "tcp:") + (v6 ? "[" + host + "]" : host) + ":" + std::to_string(port);
}

}  // namespace prefixd
