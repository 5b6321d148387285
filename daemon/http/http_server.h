// Answers HTTP requests of operators and their tools: /metrics, /healthz, /readyz, /status.json and
// the status page. It only reads. What it costs is bounded: connections, the head of a request, the
// time of each; every answer ends its connection.
//
// Thread-safety: the io thread alone calls it, except StopCollecting.
#pragma once

#include <boost/asio/io_context.hpp>
#include <functional>
#include <memory>
#include <optional>

#include "daemon/access/access.h"
#include "daemon/access/token.h"
#include "daemon/connections/listener.h"
#include "daemon/settings/config.h"
#include "daemon/watch/watch.h"
#include "prefixd/store.h"
#include "protocol/server_stats.h"

namespace prefixd::daemon {

class HttpServer {
 public:
  struct Parts {
    boost::asio::io_context& io;
    const Config& config;
    const Access& access;
    Store& store;
    const Watch& watch;
    std::function<wire::ServerStats()> stats;  // any thread
  };
  // token: of http.token_file. Everything in `parts` must outlive this object, the store only
  // StopCollecting.
  HttpServer(Parts parts, Listener listener, std::optional<TokenHash> token);
  ~HttpServer();

  void Replace(std::optional<TokenHash> token);
  // Goes on to answer, and /readyz says that the daemon is stopping.
  void SetStopping();
  // Any thread: nothing asks the store behind it.
  void StopCollecting();
  // Closes all sockets.
  void Close();

 private:
  class Impl;
  std::shared_ptr<Impl> impl_;
};

}  // namespace prefixd::daemon
