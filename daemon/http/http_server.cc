#include "daemon/http/http_server.h"

#include <spdlog/spdlog.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <boost/asio/basic_socket_acceptor.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/generic/stream_protocol.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/asio/write.hpp>
#include <chrono>
#include <map>
#include <string>
#include <utility>
#include <variant>

#include "daemon/http/collector.h"
#include "daemon/http/message.h"
#include "daemon/http/page.h"
#include "daemon/http/readers.h"
#include "daemon/limits/with_memory.h"
#include "daemon/process/log_throttle.h"

namespace prefixd::daemon {

namespace asio = boost::asio;
using Acceptor = asio::basic_socket_acceptor<asio::generic::stream_protocol>;
using Socket = asio::generic::stream_protocol::socket;
using asio::use_awaitable;

namespace {

constexpr auto kAcceptPause = std::chrono::milliseconds(100);  // after EMFILE and its kin
// How long a client that was answered may go on to send, so that the end of the connection does not
// take the answer from it.
constexpr auto kLinger = std::chrono::seconds(1);
constexpr size_t kMostLingerBytes = 64u << 10;

struct Peer {
  explicit Peer(Socket s, asio::io_context& io) : socket(std::move(s)), timer(io) {}
  Socket socket;
  asio::steady_timer timer;
  size_t lease = 0;    // counts what the timer was set for
  bool asked = false;  // its whole request came
};
using PeerPtr = std::shared_ptr<Peer>;

// An answer that the collector makes.
struct Awaited {
  explicit Awaited(asio::io_context& io) : there(io) {}
  asio::steady_timer there;
  std::optional<HttpAnswer> answer;
};

void CloseSocket(Peer& peer) {
  boost::system::error_code ignored;
  peer.socket.close(ignored);
}

// Closes the connection unless it is called again, or the peer goes, within the time.
void Limit(const PeerPtr& peer, std::chrono::steady_clock::duration time) {
  const size_t lease = ++peer->lease;
  peer->timer.expires_after(time);
  WithMemory([&] {
    peer->timer.async_wait([peer, lease](boost::system::error_code ec) {
      if (!ec && peer->lease == lease) CloseSocket(*peer);
    });
  });
}

}  // namespace

class HttpServer::Impl : public std::enable_shared_from_this<HttpServer::Impl> {
 public:
  Impl(Parts parts, Listener listener, std::optional<TokenHash> token)
      : io_(parts.io),
        time_(std::chrono::seconds(parts.config.http_timeout_s)),
        most_(parts.config.http_max_connections),
        readers_(IsLoopback(listener.address().host), token, parts.access,
                 !parts.config.tokens_file.empty()),
        page_(StatusPage()),
        collector_(parts.store, parts.config.store.dir, parts.watch, std::move(parts.stats)),
        listener_(std::move(listener)),
        acceptor_(io_) {
    acceptor_.assign(asio::generic::stream_protocol(AF_INET, SOCK_STREAM), listener_.Release());
  }

  void Start() {
    asio::co_spawn(
        io_, [self = shared_from_this()] { return self->Accept(self); },
        [self = shared_from_this()](const std::exception_ptr& thrown) {
          if (!thrown || self->closed_) return;
          WithMemory([&] { self->Start(); });  // most likely std::bad_alloc for a connection
        });
  }
  void Replace(std::optional<TokenHash> token) { readers_.Replace(token); }
  void SetStopping() { collector_.SetStopping(); }
  void StopCollecting() { collector_.Stop(); }
  void Close() {
    closed_ = true;
    boost::system::error_code ignored;
    acceptor_.close(ignored);
    for (const auto& [id, peer] : peers_) {
      peer->timer.cancel();
      CloseSocket(*peer);
    }
  }

 private:
  asio::awaitable<void> Accept(std::shared_ptr<Impl> self) {
    while (!closed_) {
      boost::system::error_code ec;
      Socket socket(io_);
      co_await acceptor_.async_accept(socket, asio::redirect_error(use_awaitable, ec));
      if (closed_ || ec == asio::error::operation_aborted) break;
      if (ec) {
        asio::steady_timer pause(io_, kAcceptPause);
        co_await pause.async_wait(asio::redirect_error(use_awaitable, ec));
        continue;
      }
      if (peers_.size() >= most_ && !MakeRoom()) {
        const std::string text = WriteAnswer(
            TextAnswer(503, "too many connections (http.max_connections); try again"), false);
        (void)!::send(socket.native_handle(), text.data(), text.size(),
                      MSG_DONTWAIT | MSG_NOSIGNAL);
        continue;
      }
      const auto peer = std::make_shared<Peer>(std::move(socket), io_);
      const uint64_t id = next_id_++;
      peers_.emplace(id, peer);
      try {
        asio::co_spawn(
            io_, [self, peer] { return self->Talk(self, peer); },
            [self, peer, id](const std::exception_ptr&) {  // most likely std::bad_alloc
              ++peer->lease;
              peer->timer.cancel();
              CloseSocket(*peer);
              self->peers_.erase(id);
            });
      } catch (...) {  // the same, before the conversation began; its place is free again
        peers_.erase(id);
        throw;
      }
    }
    (void)self;
  }

  // Closes the peer that has been connected longest without having asked: who connects and says
  // nothing, or little, keeps nobody from /healthz. False: all have asked.
  bool MakeRoom() {
    const auto silent =
        std::ranges::find_if(peers_, [](const auto& entry) { return !entry.second->asked; });
    if (silent == peers_.end()) return false;
    CloseSocket(*silent->second);  // which ends its conversation
    peers_.erase(silent);
    return true;
  }

  // One request and its answer.
  asio::awaitable<void> Talk(std::shared_ptr<Impl> self, PeerPtr peer) {
    boost::system::error_code ec;
    std::array<char, 2048> bytes;
    RequestReader reader;
    Limit(peer, time_);
    while (!reader.done()) {
      const size_t n = co_await peer->socket.async_read_some(
          asio::buffer(bytes), asio::redirect_error(use_awaitable, ec));
      if (ec) co_return;
      reader.Take({bytes.data(), n});
    }
    peer->asked = true;
    ++peer->lease;  // the answer has its own time
    HttpAnswer answer = reader.refusal();
    if (reader.request()) answer = co_await Answer(*reader.request());
    const bool head = reader.request() && reader.request()->head;
    const std::string text = WriteAnswer(answer, head);
    Limit(peer, time_);
    co_await asio::async_write(peer->socket, asio::buffer(text),
                               asio::redirect_error(use_awaitable, ec));
    if (ec) co_return;
    peer->socket.shutdown(asio::socket_base::shutdown_send, ec);
    Limit(peer, kLinger);
    for (size_t more = 0; !ec && more < kMostLingerBytes;) {
      more += co_await peer->socket.async_read_some(asio::buffer(bytes),
                                                    asio::redirect_error(use_awaitable, ec));
    }
    (void)self;
  }

  asio::awaitable<HttpAnswer> Answer(const HttpRequest& request) {
    const auto admitted = readers_.Admit(request);
    if (const auto* refused = std::get_if<HttpAnswer>(&admitted)) {
      if (request.token) {
        if (const auto more = refusals_.Line()) spdlog::warn("http: a wrong token{}", *more);
      }
      co_return *refused;
    }
    const auto& viewer = std::get<Viewer>(admitted);
    if (request.path == "/") co_return page_;
    if (request.path == "/healthz") co_return TextAnswer(200, "ok");
    if (request.path == "/login") {
      if (!request.token) co_return AskForToken("the token is the password; any name will do");
      HttpAnswer answer = TextAnswer(303, "welcome");
      answer.fields.emplace_back("Location", "/");
      co_return answer;
    }
    if (request.path == "/metrics") co_return co_await Collect(Collector::What::kMetrics, viewer);
    if (request.path == "/status.json") {
      co_return co_await Collect(Collector::What::kStatus, viewer);
    }
    if (request.path == "/readyz") co_return co_await Collect(Collector::What::kReady, viewer);
    co_return TextAnswer(404, "there are /, /status.json, /metrics, /healthz and /readyz");
  }

  asio::awaitable<HttpAnswer> Collect(Collector::What what, Viewer viewer) {
    const auto awaited = std::make_shared<Awaited>(io_);
    awaited->there.expires_after(time_);
    const bool asked = collector_.Ask(what, viewer, [awaited, &io = io_](HttpAnswer answer) {
      const auto made = WithMemory([&] { return std::make_shared<HttpAnswer>(answer); });
      PostSurely(io, [awaited, made] {
        awaited->answer = std::move(*made);
        awaited->there.cancel();
      });
    });
    if (!asked) co_return TextAnswer(503, "too many requests wait, or the daemon has stopped");
    boost::system::error_code ignored;
    co_await awaited->there.async_wait(asio::redirect_error(use_awaitable, ignored));
    if (!awaited->answer) co_return TextAnswer(503, "the store did not answer in time");
    co_return std::move(*awaited->answer);
  }

  asio::io_context& io_;
  const std::chrono::seconds time_;
  const size_t most_;
  HttpReaders readers_;
  const HttpAnswer page_;
  Collector collector_;
  Listener listener_;
  Acceptor acceptor_;
  std::map<uint64_t, PeerPtr> peers_;  // ids ascend: the longest connected comes first
  uint64_t next_id_ = 0;
  LogThrottle refusals_;
  bool closed_ = false;
};

HttpServer::HttpServer(Parts parts, Listener listener, std::optional<TokenHash> token)
    : impl_(std::make_shared<Impl>(std::move(parts), std::move(listener), token)) {
  impl_->Start();
}
HttpServer::~HttpServer() {
  impl_->Close();
  impl_->StopCollecting();
}
void HttpServer::Replace(std::optional<TokenHash> token) { impl_->Replace(token); }
void HttpServer::SetStopping() { impl_->SetStopping(); }
void HttpServer::StopCollecting() { impl_->StopCollecting(); }
void HttpServer::Close() { impl_->Close(); }

}  // namespace prefixd::daemon
