#include <spdlog/spdlog.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <boost/asio/basic_socket_acceptor.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/signal_set.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <chrono>
#include <csignal>
#include <exception>
#include <map>
#include <utility>  // before Asio 1.74's coroutines, which forget it

#include "base/capture_errors.h"
#include "daemon/connections/connection.h"
#include "daemon/connections/step_service.h"
#include "daemon/http/http_server.h"
#include "daemon/limits/tenant_threads.h"
#include "daemon/limits/with_memory.h"
#include "daemon/process/notify.h"
#include "daemon/reload.h"
#include "daemon/server.h"
#include "prefixd/version.h"
#include "protocol/socket.h"

namespace prefixd::daemon {

namespace asio = boost::asio;
using Acceptor = asio::basic_socket_acceptor<asio::generic::stream_protocol>;

namespace {
constexpr auto kAcceptPause = std::chrono::milliseconds(100);  // after EMFILE and its kin
constexpr auto kAfterGrace = std::chrono::seconds(3);
// So few that matches on a slow disk leave the cores to steps, so many that one holds up no other.
constexpr size_t kMatchThreads = 4;

std::string Addresses(const std::vector<Listener>& listeners) {
  std::string text;
  for (const Listener& l : listeners) text += (text.empty() ? "" : " ") + l.address().ToString();
  return text;
}
}  // namespace

class Server::Impl {
 public:
  Impl(const Config& config, std::unique_ptr<Store> store, Access access,
       std::shared_ptr<MemoryBudget> memory, uint64_t max_puts, TlsContext tls)
      : workers_(config.workers),
        long_calls_(config.long_workers),
        matches_(kMatchThreads),
        steps_(config.step_threads, config.polling_threads, context_.counters,
               memory ? memory->Shared() : MemoryAccount()),
        store_(std::move(store)),
        context_{.config = config,
                 .io = io_,
                 .workers = workers_,
                 .long_calls = long_calls_,
                 .matches = matches_,
                 .steps = steps_,
                 .store = store_.get(),
                 .memory = std::move(memory),
                 .counters = {},
                 .access = std::move(access),
                 .tls = std::move(tls),
                 .limits = ConnectionLimits(config),
                 .refusals = {},
                 .puts = {max_puts, "puts", "the process's open files"},
                 .sessions = {config.store.max_sessions, "sessions", "limits.max_sessions",
                              Slots::Bounds::kPart},
                 .stats = {},
                 .on_gone = {}},
        signals_(io_, SIGTERM, SIGINT),
        hangup_(io_, SIGHUP),
        grace_timer_(io_),
        sweep_timer_(io_),
        watchdog_timer_(io_),
        points_timer_(io_) {
    context_.on_gone = [this](const Connection* c) { Forget(c); };
  }

  void ServeHttp(Listener listener, std::optional<TokenHash> token) {
    http_listener_.emplace(std::move(listener));
    http_token_ = token;
  }

  int Run(std::vector<Listener> listeners, const std::function<void()>& on_ready,
          const std::function<void()>& on_stopping) {
    listeners_ = std::move(listeners);
    on_stopping_ = on_stopping;
    context_.stats = [this, where = Addresses(listeners_)] { return Stats(where); };
    WaitForSignal();
    WaitForHangup();
    AddPoints();
    if (http_listener_) {
      http_.emplace(HttpServer::Parts{io_, context_.config, context_.access, *store_,
                                      context_.watch, context_.stats},
                    *std::move(http_listener_), http_token_);
    }
    for (Listener& listener : listeners_) {
      const bool local = listener.address().kind == Address::Kind::kUnix;
      auto acceptor = std::make_shared<Acceptor>(io_);
      acceptor->assign(asio::generic::stream_protocol(local ? AF_UNIX : AF_INET, SOCK_STREAM),
                       listener.Release());
      acceptors_.push_back(acceptor);
      StartAccepting(acceptor, local);
    }
    SweepPuts();
    on_ready();
    if (watchdog_every_.count() > 0) TellWatchdog();
    while (true) {
      try {
        io_.run();
        break;
      } catch (const std::bad_alloc&) {  // a handler's, whose connection is closed by its timeouts
        spdlog::error("out of memory on the thread of the sockets");
      }
    }
    workers_.Join();
    long_calls_.Join();
    matches_.Join();
    steps_.Stop();
    return exit_code_;
  }

 private:
  wire::ServerStats Stats(const std::string& where) const {
    wire::ServerStats s = context_.counters.Read();
    s.version = PREFIXD_VERSION;
    s.address = where;
    s.dir = context_.config.store.dir.string();
    s.pid = static_cast<uint32_t>(::getpid());
    s.uptime_ms = static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::milliseconds>(
                                            std::chrono::steady_clock::now() - started_)
                                            .count());
    return s;
  }

  void StartAccepting(const std::shared_ptr<Acceptor>& acceptor, bool local) {
    asio::co_spawn(
        io_, [this, acceptor, local] { return Accept(acceptor, local); },
        [this, acceptor, local](const std::exception_ptr& thrown) {
          if (!thrown || stopping_) return;
          try {
            std::rethrow_exception(thrown);
          } catch (const std::exception& e) {  // most likely std::bad_alloc for a connection
            spdlog::error("a connection could not be accepted: {}", e.what());
          }
          WithMemory([&] { StartAccepting(acceptor, local); });
        });
  }

  // Looks for idle puts and for messages that do not arrive, every 1 to 15 seconds.
  void SweepPuts() {
    const uint64_t least = std::min(context_.config.put_idle_s, context_.config.frame_timeout_s);
    const uint64_t period = std::clamp<uint64_t>(least / 4, 1, 15);
    sweep_timer_.expires_after(std::chrono::seconds(period));
    WithMemory([this] {
      sweep_timer_.async_wait([this](boost::system::error_code ec) {
        if (ec || stopping_) return;
        const auto open = WithMemory([this] { return connections_; });
        for (const auto& [raw, connection] : open) {
          connection->CloseIfSlow();
          connection->AbortIdlePuts();
        }
        SweepPuts();
      });
    });
  }

  // The history of steps.
  void AddPoints() {
    WithMemory([this] {
      context_.watch.AddPoint(std::chrono::duration_cast<std::chrono::milliseconds>(
                                  std::chrono::system_clock::now().time_since_epoch())
                                  .count());
    });
    points_timer_.expires_after(Watch::kPointEvery);
    WithMemory([this] {
      points_timer_.async_wait([this](boost::system::error_code ec) {
        if (!ec && !stopping_) AddPoints();
      });
    });
  }

  // From the thread of the sockets, so that the service manager learns when that hangs; until the
  // very end, since closing the store may take long.
  void TellWatchdog() {
    (void)Notify("WATCHDOG=1");  // if it is missed, the manager says so
    watchdog_timer_.expires_after(watchdog_every_);
    WithMemory([this] {
      watchdog_timer_.async_wait([this](boost::system::error_code ec) {
        if (!ec) TellWatchdog();
      });
    });
  }

  asio::awaitable<void> Accept(std::shared_ptr<Acceptor> acceptor, bool local) {
    while (!stopping_) {
      boost::system::error_code ec;
      Connection::Socket socket(io_);
      co_await acceptor->async_accept(socket, asio::redirect_error(asio::use_awaitable, ec));
      if (stopping_ || ec == asio::error::operation_aborted) break;
      if (ec) {
        spdlog::warn("accept: {}", ec.message());
        asio::steady_timer pause(io_, kAcceptPause);
        co_await pause.async_wait(asio::redirect_error(asio::use_awaitable, ec));
        continue;
      }
      const uint64_t id = next_id_++;
      const ConnectionLimits::Arrival arrival = context_.limits.Arrive(id, local);
      if (arrival.close) CloseSilent(*arrival.close);
      if (!arrival.admitted.ok()) {
        Refuse(socket, arrival.admitted.error(), !local && context_.tls);
        continue;
      }
      if (!local) SetTcpOptions(socket.native_handle());
      std::shared_ptr<Connection> connection;
      const Status made = CaptureErrors([&]() -> Status {
        connection = std::make_shared<Connection>(context_, std::move(socket), local,
                                                  local ? nullptr : context_.tls, id);
        connections_.emplace(connection.get(), connection);
        return {};
      });
      if (!made.ok()) {
        context_.limits.Leave(id);
        spdlog::error("a connection could not be accepted: {}", made.error().message);
        continue;
      }
      WithMemory([&] { connection->Start(); });
    }
  }

  void CloseSilent(uint64_t id) {
    ++context_.counters.connections_silent_closed;
    const auto silent = std::ranges::find_if(
        connections_, [&](const auto& entry) { return entry.second->id() == id; });
    if (silent == connections_.end()) return;
    const std::shared_ptr<Connection> connection = silent->second;
    connection->Close();
  }

  // Over TLS nothing is said: that would take a handshake first.
  void Refuse(Connection::Socket& socket, const Error& error, bool tls) {
    ++context_.counters.connections_refused;
    if (const auto more = context_.refusals.Line()) {
      spdlog::warn("connection refused: {}{}", error.message, *more);
    }
    if (tls) return;
    const auto control = wire::PackControl(wire::ErrorToJson(error));
    wire::FrameHeader header;
    header.type = wire::MessageType::kError;
    header.control_bytes = static_cast<uint32_t>(control.size());
    const auto encoded = wire::EncodeHeader(header);
    std::vector<std::byte> bytes(encoded.begin(), encoded.end());
    bytes.insert(bytes.end(), control.begin(), control.end());
    // A failure is ignored; the empty buffer of a fresh socket takes the message.
    (void)::send(socket.native_handle(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  }

  void WaitForSignal() {
    WithMemory([this] {
      signals_.async_wait([this](boost::system::error_code ec, int signal) {
        if (ec) return;
        if (stopping_) Die("second signal");
        spdlog::info("{}: stopping", signal == SIGTERM ? "SIGTERM" : "SIGINT");
        WaitForSignal();
        Stop();
      });
    });
  }

  // On a worker, because a disk may be slow.
  void WaitForHangup() {
    WithMemory([this] {
      hangup_.async_wait([this](boost::system::error_code ec, int) {
        if (ec || stopping_) return;
        workers_.PostOwn([this] {
          const auto files = WithMemory([] { return std::make_shared<ReloadedFiles>(); });
          const Status read = ReadAgain(context_.config, http_.has_value(), files.get());
          if (!read.ok()) spdlog::error("SIGHUP: {}", read.error().message);
          PostSurely(io_, [this, files] { Reloaded(*files); });
        });
      });
    });
  }

  void Reloaded(const ReloadedFiles& files) {
    if (stopping_) return;
    WaitForHangup();
    if (!PutIntoForce(files, context_, http_ ? &*http_ : nullptr)) return;
    const auto open = WithMemory([this] { return connections_; });  // some may go
    for (const auto& [raw, connection] : open) connection->CloseIfRevoked();
  }

  void Stop() {
    stopping_ = true;
    points_timer_.cancel();
    if (http_) http_->SetStopping();
    hangup_.cancel();
    on_stopping_();
    sweep_timer_.cancel();
    boost::system::error_code ignored;
    for (auto& acceptor : acceptors_) acceptor->close(ignored);
    const auto open = WithMemory([this] { return connections_; });  // Drain may erase some
    for (const auto& [raw, connection] : open) connection->Drain();
    if (connections_.empty()) return CloseStore();
    grace_timer_.expires_after(std::chrono::seconds(context_.config.shutdown_grace_s));
    WithMemory([this] {
      grace_timer_.async_wait([this](boost::system::error_code ec) {
        if (!ec) GraceIsOver();
      });
    });
  }

  void GraceIsOver() {
    spdlog::warn("calls still in flight after {} s: closing their connections",
                 context_.config.shutdown_grace_s);
    const auto open = WithMemory([this] { return connections_; });
    for (const auto& [raw, connection] : open) connection->Close();
    grace_timer_.expires_after(kAfterGrace);
    WithMemory([this] {
      grace_timer_.async_wait([this](boost::system::error_code ec) {
        if (!ec) Die("calls do not end");
      });
    });
  }

  void Forget(const Connection* connection) {
    context_.limits.Leave(connection->id());
    connections_.erase(connection);
    if (stopping_ && connections_.empty()) CloseStore();
  }

  // The store closes off the io thread, which stays free for a second signal.
  void CloseStore() {
    if (std::exchange(closing_store_, true)) return;
    grace_timer_.cancel();
    workers_.PostOwn([this] {
      if (http_) http_->StopCollecting();
      store_.reset();
      PostSurely(io_, [this] {
        for (Listener& listener : listeners_) listener.RemoveFile();
        spdlog::info("stopped");
        if (http_) http_->Close();
        PostSurely(io_, [this] { io_.stop(); });  // behind what Close ended
      });
    });
  }

  // All acknowledged puts are durable already; recovery at the next start removes the rest.
  [[noreturn]] void Die(const char* why) {
    spdlog::error("{}: ending at once", why);
    spdlog::default_logger()->flush();
    for (Listener& listener : listeners_) listener.RemoveFile();
    std::_Exit(1);
  }

  const std::chrono::steady_clock::time_point started_ = std::chrono::steady_clock::now();
  asio::io_context io_{1};
  TenantThreads workers_, long_calls_, matches_;
  StepService steps_;
  std::unique_ptr<Store> store_;
  std::vector<Listener> listeners_;
  std::function<void()> on_stopping_;
  ServerContext context_;
  asio::signal_set signals_, hangup_;
  asio::steady_timer grace_timer_, sweep_timer_, watchdog_timer_, points_timer_;
  const std::chrono::microseconds watchdog_every_ = WatchdogInterval();
  std::vector<std::shared_ptr<Acceptor>> acceptors_;
  std::map<const Connection*, std::shared_ptr<Connection>> connections_;
  std::optional<Listener> http_listener_;
  std::optional<TokenHash> http_token_;
  std::optional<HttpServer> http_;
  uint64_t next_id_ = 1;
  bool stopping_ = false, closing_store_ = false;
  int exit_code_ = 0;
};

Server::Server(const Config& config, std::unique_ptr<Store> store, Access access,
               std::shared_ptr<MemoryBudget> memory, uint64_t max_puts, TlsContext tls)
    : impl_(std::make_unique<Impl>(config, std::move(store), std::move(access), std::move(memory),
                                   max_puts, std::move(tls))) {}
Server::~Server() = default;

void Server::ServeHttp(Listener listener, std::optional<TokenHash> token) {
  impl_->ServeHttp(std::move(listener), token);
}

int Server::Run(std::vector<Listener> listeners, const std::function<void()>& on_ready,
                const std::function<void()>& on_stopping) {
  return impl_->Run(std::move(listeners), on_ready, on_stopping);
}

}  // namespace prefixd::daemon
