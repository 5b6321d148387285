#include "daemon/http/readers.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

namespace prefixd::daemon {
namespace {

constexpr size_t kLeastTokenBytes = 16;

}  // namespace

bool IsLoopback(std::string_view host) {
  if (host == "localhost" || host == "::1") return true;
  // "127.evil.example" is a name, not an address.
  return host.starts_with("127.") && std::ranges::count(host, '.') == 3 &&
         host.find_first_not_of("0123456789.") == host.npos;
}

std::string HostWithoutPort(std::string_view host) {
  if (host.starts_with('[')) {
    const size_t end = host.find(']');
    return end == host.npos ? "" : std::string(host.substr(1, end - 1));
  }
  return std::string(host.substr(0, host.find(':')));
}

Result<TokenHash> ReadHttpToken(const std::string& file) {
  const auto failed = [&](Code code, const std::string& why) {
    return Error{code, "http.token_file " + file + ": " + why};
  };
  const int fd = ::open(file.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0 && errno == EACCES) {
    return failed(Code::kNotFound, "the daemon's user (" + std::to_string(::geteuid()) +
                                       ") may not read it: make that user its owner (chown)");
  }
  if (fd < 0) return failed(Code::kNotFound, std::strerror(errno));
  struct stat st {};
  std::array<char, kMaxTokenBytes + 1> bytes{};
  const bool known = ::fstat(fd, &st) == 0;
  const ssize_t n = ::read(fd, bytes.data(), bytes.size());
  ::close(fd);
  if (!known || n < 0 || !S_ISREG(st.st_mode)) return failed(Code::kIo, "it is no readable file");
  if ((st.st_mode & 077) != 0 || (st.st_uid != ::geteuid() && st.st_uid != 0)) {
    return failed(Code::kFailedPrecondition,
                  "others may read or write it; make the daemon's user its owner, and its mode "
                  "0600");
  }
  std::string_view token(bytes.data(), static_cast<size_t>(n));
  token = token.substr(0, token.find_first_of("\r\n"));
  if (token.size() < kLeastTokenBytes || token.size() > kMaxTokenBytes) {
    return failed(Code::kInvalidArgument,
                  "its first line must be a token of 16 to 1024 characters; `openssl rand -hex 32` "
                  "makes one");
  }
  return HashToken(token);
}

HttpAnswer AskForToken(std::string_view why) {
  HttpAnswer answer = TextAnswer(401, why);
  answer.fields.emplace_back("WWW-Authenticate", "Basic realm=\"prefixd\", charset=\"UTF-8\"");
  return answer;
}

std::variant<Viewer, HttpAnswer> HttpReaders::Admit(const HttpRequest& request) const {
  // A page of another site whose name was made to point here would send that name.
  if (loopback_ && !request.host.empty() && !IsLoopback(HostWithoutPort(request.host))) {
    return TextAnswer(421, "the field Host names another machine; use localhost");
  }
  if (!request.token) {
    if (!loopback_) return AskForToken("a token is needed here (http.token_file, auth.tokens)");
    return Viewer{};
  }
  if (request.token->size() > kMaxTokenBytes) return AskForToken("the token is too long");
  if (token_ && SameHash(HashToken(*request.token), *token_)) {
    return Viewer{Viewer::Sees::kAll, ""};
  }
  if (tokens_) {
    wire::Hello hello;
    hello.token = *request.token;
    hello.admin = true;
    if (access_.Admit(hello, std::nullopt).ok()) return Viewer{Viewer::Sees::kAll, ""};
    hello.admin = false;
    const auto credential = access_.Admit(hello, std::nullopt);
    if (credential.ok() && credential->grant.read) {
      return Viewer{Viewer::Sees::kTenant, credential->grant.tenant};
    }
  }
  return AskForToken("the token is not one that the daemon knows");
}

}  // namespace prefixd::daemon
