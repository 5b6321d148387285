// Begins TLS, and turns away who speaks something else.
#include <utility>  // before Asio 1.74's coroutines, which forget it

#include <spdlog/spdlog.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <boost/asio/buffer.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <cstddef>

#include "daemon/connections/connection.h"

namespace prefixd::daemon {

namespace asio = boost::asio;

namespace {

constexpr std::byte kHandshakeRecord{0x16};  // the first byte of TLS
constexpr size_t kMostAfterFailure = 64u << 10;

// Closing over unread bytes would take the answer from the peer.
void TakeAway(int socket) {
  std::array<std::byte, 16384> nowhere;
  (void)::recv(socket, nowhere.data(), nowhere.size(), MSG_DONTWAIT);
}

}  // namespace

asio::awaitable<bool> Connection::Secure() {
  if (!tls_) co_return true;
  boost::system::error_code ec;
  co_await stream_.socket().async_wait(Socket::wait_read,
                                       asio::redirect_error(asio::use_awaitable, ec));
  std::byte first{};
  const bool came = !ec && ::recv(stream_.native_handle(), &first, 1, MSG_PEEK | MSG_DONTWAIT) == 1;
  if (!came) {
    Close();
    co_return false;
  }
  if (first != kHandshakeRecord) {
    TakeAway(stream_.native_handle());
    Fatal(Error{Code::kFailedPrecondition,
                "this port takes TLS alone: connect to an address that begins with tls:"});
    co_return false;
  }
  co_await stream_.Handshake(tls_, asio::redirect_error(asio::use_awaitable, ec));
  if (!ec || closed_) co_return !closed_;
  ++context_.counters.protocol_errors;
  if (const auto more = context_.refusals.Line()) {
    spdlog::info("connection {}: closed: TLS: {}{}", id_, ec.message(), *more);
  }
  // The peer is to read the reason, which closing over what it still sends would take from it.
  stream_.socket().shutdown(Socket::shutdown_send, ec);
  std::array<std::byte, 512> nowhere;
  for (size_t left = kMostAfterFailure; left > 0 && !ec && !closed_;) {
    const size_t n = co_await stream_.socket().async_read_some(
        asio::buffer(nowhere), asio::redirect_error(asio::use_awaitable, ec));
    left -= std::min(left, n);
  }
  Close();
  co_return false;
}

}  // namespace prefixd::daemon
