// Serves a store on listening sockets and ends in order on a signal.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "base/memory_budget.h"
#include "daemon/access/access.h"
#include "daemon/access/tls.h"
#include "daemon/access/token.h"
#include "daemon/connections/listener.h"
#include "daemon/settings/config.h"
#include "prefixd/result.h"
#include "prefixd/store.h"

namespace prefixd::daemon {

class Server {
 public:
  // access: who may do what; read again from auth.tokens on SIGHUP, as tls is from its files.
  // memory: the store's, from which connections take theirs. The constructor starts to catch
  // SIGTERM, SIGINT and SIGHUP; Run acts on those that came before it. Make sockets, which other
  // processes see, after this. max_puts: that all connections together may have open.
  Server(const Config& config, std::unique_ptr<Store> store, Access access,
         std::shared_ptr<MemoryBudget> memory, uint64_t max_puts, TlsContext tls = nullptr);
  ~Server();

  // Answers HTTP on this listener while the server runs; to be called before Run. token: that of
  // http.token_file, if there is one; it is read again on SIGHUP.
  void ServeHttp(Listener listener, std::optional<TokenHash> token);

  // Serves until SIGTERM or SIGINT. Then it stops accepting, finishes calls in flight (at most
  // limits.shutdown_grace_s), closes the store and removes the socket. Returns the exit code; a
  // second signal, or calls that outlast the grace by far, end the process at once with code 1.
  // `on_ready` is called once, when connections are accepted; `on_stopping` on the signal.
  int Run(std::vector<Listener> listeners, const std::function<void()>& on_ready,
          const std::function<void()>& on_stopping);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace prefixd::daemon
