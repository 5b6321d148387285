// Keeps a client connected: opens its connection again when the daemon was away, and repeats the
// calls that the loss interrupted. The store and its sessions share one. Internal to client_lib.
//
// Thread-safety: all methods may be called concurrently.
#pragma once

#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <type_traits>
#include <utility>

#include "base/opened_here.h"
#include "client_lib/connection.h"

namespace prefixd {

class Link {
 public:
  static constexpr int kMostTries = 5;

  Link(Address address, ConnectOptions options)
      : address_(std::move(address)), options_(std::move(options)) {}

  // Returns the connection; opens another one when it is broken. While no daemon answers, waits for
  // one until ConnectOptions::reconnect_ms after the first call that missed it; the first
  // connection of all is tried once. Calls that come meanwhile share the attempt, and its failure.
  Result<std::shared_ptr<Connection>> Live() { return Live(/*look=*/false); }
  // The same for a call that is not repeated, and so must not be sent over a connection whose end
  // nobody has noticed yet.
  Result<std::shared_ptr<Connection>> LiveNow() { return Live(/*look=*/true); }
  // Opens a connection of its own, and waits as Live does: from now on, where Live has not missed
  // the daemon before.
  Result<std::shared_ptr<Connection>> Aside(bool shared_memory);

  // Runs `call(connection)`, which returns a Result, and again where the daemon went away
  // meanwhile, kMostTries times in all: a call that makes a daemon end must not end each new one.
  // The call must be one that may run twice.
  template <typename Call>
  std::invoke_result_t<Call, std::shared_ptr<Connection>> Run(const Call& call) {
    return RunOver([this] { return Live(); }, call);
  }
  // The same over the connection that `open` returns, which is asked for a live one each time.
  template <typename Open, typename Call>
  std::invoke_result_t<Call, std::shared_ptr<Connection>> RunOver(const Open& open,
                                                                  const Call& call) {
    for (int tries = 1;; ++tries) {
      PREFIXD_ASSIGN(std::shared_ptr<Connection> connection, open());
      auto result = call(connection);
      if (result.ok() || tries == kMostTries || !MayRepeat(*connection, result.error())) {
        return result;
      }
    }
  }
  Result<Connection::Reply> Do(const Connection::Call& call) {
    return Run([&](const auto& connection) { return connection->Do(call); });
  }

  // kFailedPrecondition in a child of the process that made the link.
  Status CheckProcess() const { return opened_.Check(); }
  // Whether sessions attach again.
  bool reconnects() const { return options_.reconnect_ms > 0; }
  // Whether this error of a call over `connection` means that the daemon went away, so that the
  // call may be sent again.
  bool MayRepeat(const Connection& connection, const Error& error) const {
    return reconnects() && error.code == Code::kUnavailable && connection.lost();
  }

  // Returns whether tensors go through shared memory.
  bool shared_memory() const;

 private:
  using Clock = std::chrono::steady_clock;

  Result<std::shared_ptr<Connection>> Live(bool look);
  // The lock is held for both. Until when a call that finds no daemon waits for one.
  Clock::time_point PatientUntil() const;
  // Notes that a daemon answered, if it did, also where it refused.
  void Found(const Result<std::shared_ptr<Connection>>& opened);
  Result<std::shared_ptr<Connection>> OpenUntil(const ConnectOptions& options,
                                                Clock::time_point until) const;

  const OpenedHere opened_;
  const Address address_;
  const ConnectOptions options_;
  mutable CallMutex mutex_;  // held while a connection is opened, so that one is
  std::shared_ptr<Connection> connection_;
  std::optional<Clock::time_point> away_since_;  // when Live missed the daemon
  struct Failure {
    Error error;
    Clock::time_point when;
  };
  std::optional<Failure> failure_;  // of Live's last attempt
};

}  // namespace prefixd
