// Connects a client to a daemon under test.
#pragma once

#include <memory>
#include <utility>

#include "client_lib/remote_store.h"
#include "tests/daemon/daemon_process.h"
#include "tests/support/test.h"

namespace prefixd::testing {

// Returns null and adds a test failure when the daemon refuses the connection.
inline std::unique_ptr<RemoteStore> ConnectTo(const DaemonProcess& daemon,
                                              const ConnectOptions& options = {}) {
  auto client = RemoteStore::Connect(daemon.address(), options);
  EXPECT_TRUE(client.ok()) << (client.ok() ? "" : client.error().message);
  return client.ok() ? *std::move(client) : nullptr;
}

}  // namespace prefixd::testing
