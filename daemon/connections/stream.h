// The bytes of one connection: plain, or through TLS.
//
// Thread-safety: the io thread alone uses it; one read and one write may be under way at a time.
#pragma once

#include <utility>  // before Asio 1.74's coroutines, which forget it

#include <boost/asio/async_result.hpp>
#include <boost/asio/generic/stream_protocol.hpp>
#include <boost/asio/ssl/stream.hpp>
#include <optional>

#include "daemon/access/tls.h"

namespace prefixd::daemon {

// It is an asynchronous stream of Asio's: asio::async_read and its kin take it.
class Stream {
 public:
  using Socket = boost::asio::generic::stream_protocol::socket;
  using executor_type = Socket::executor_type;

  explicit Stream(Socket socket) : socket_(std::move(socket)) {}

  executor_type get_executor() { return socket_.get_executor(); }
  Socket& socket() { return socket_; }
  int native_handle() { return socket_.native_handle(); }
  bool secure() const { return tls_.has_value(); }

  // Everything goes through TLS from here on. Completes with an error_code.
  template <typename Token>
  auto Handshake(const TlsContext& context, Token&& token) {
    context_ = context;
    tls_.emplace(socket_, *context_);
    return tls_->async_handshake(boost::asio::ssl::stream_base::server, std::forward<Token>(token));
  }

  template <typename Buffers, typename Token>
  auto async_read_some(const Buffers& buffers, Token&& token) {
    return boost::asio::async_initiate<Token, void(boost::system::error_code, size_t)>(
        [this](auto handler, const Buffers& into) {
          if (tls_) {
            tls_->async_read_some(into, std::move(handler));
          } else {
            socket_.async_read_some(into, std::move(handler));
          }
        },
        token, buffers);
  }
  template <typename Buffers, typename Token>
  auto async_write_some(const Buffers& buffers, Token&& token) {
    return boost::asio::async_initiate<Token, void(boost::system::error_code, size_t)>(
        [this](auto handler, const Buffers& from) {
          if (tls_) {
            tls_->async_write_some(from, std::move(handler));
          } else {
            socket_.async_write_some(from, std::move(handler));
          }
        },
        token, buffers);
  }

 private:
  Socket socket_;
  TlsContext context_;
  std::optional<boost::asio::ssl::stream<Socket&>> tls_;
};

}  // namespace prefixd::daemon
