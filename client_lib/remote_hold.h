// Holds rows that a client reads in place. Internal to client_lib.
//
// Thread-safety: a plain object; its destructor sends a message.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "base/call_scope.h"
#include "client_lib/connection.h"

namespace prefixd {

// Holds the rows that one call reads in place: their region, and the daemon's pins until
// destruction.
class RemoteHold {
 public:
  RemoteHold(std::shared_ptr<Connection> connection, uint64_t hold)
      : connection_(std::move(connection)), hold_(hold) {}
  ~RemoteHold() {
    // This fails only without a connection; the daemon has then released the rows itself. It must
    // not fail with the call that held them.
    const CarriedScope none(nullptr);
    (void)connection_->Do(
        {wire::MessageType::kReleaseRows, {{"release", {hold_}}}, {}, {}, nullptr, {}});
  }
  RemoteHold(const RemoteHold&) = delete;
  RemoteHold& operator=(const RemoteHold&) = delete;

  std::shared_ptr<const SharedRegion> region;

 private:
  const std::shared_ptr<Connection> connection_;
  const uint64_t hold_;
};

}  // namespace prefixd
