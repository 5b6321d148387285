// Opens stores from C++: an embedded store of this process, or a running daemon's.
//
//   auto store = prefixd::Connect("unix:/run/prefixd/prefixd.sock");
//   // embedded: prefixd::Open({.dir = D})
//   auto session = (*store)->Attach({.model = "llama", .tokens = prompt});
//   for each layer: (*session)->Step(layer, q, y, lse, nullptr);
//                   MergeStates(y_h, &lse_h, y_own_h, lse_own_h);
//
// Connect needs nothing but this library, and libprefixd-tls.so for TLS. Open loads
// libprefixd-embedded.so, which holds the whole store.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "prefixd/merge.h"
#include "prefixd/options.h"
#include "prefixd/restore.h"
#include "prefixd/result.h"
#include "prefixd/session.h"
#include "prefixd/store.h"

namespace prefixd {

// What either returns belongs to the process that called it. A child that fork() makes of it cannot
// use the store, its sessions and its puts (kFailedPrecondition): it connects or opens again.

// Opens a store in this process and locks its directory. kFailedPrecondition, with a sentence,
// where libprefixd-embedded.so is missing or was not built with this library: it is searched beside
// the library or program that contains this code, then where the system keeps libraries.
Result<std::unique_ptr<Store>> Open(const RuntimeOptions& options);

struct ConnectOptions {
  std::string tenant;  // default for calls that name none
  uint32_t connect_timeout_ms = 5000;
  // Bounds each call; 0: none. The daemon ends a call that takes longer (kDeadlineExceeded), and
  // the connection stays. A daemon that does not answer at all loses the connection 5 s later. Long
  // calls (WaitReady, Verify, Commit) take as long as they need. The wait for another thread's call
  // over the same connection counts.
  uint32_t call_timeout_ms = 120000;
  // How long calls wait for a daemon that went away, counted from the first that missed it. When it
  // is back, sessions attach to the same prefix again and go on with their policy; their ledger
  // begins anew; one whose prefix was compressed meanwhile has ended. Puts do not survive. 0: calls
  // fail at once, and sessions for good.
  uint32_t reconnect_ms = 5000;
  bool shared_memory = true;  // Unix sockets only: tensors and steps go through shared memory
  // How long a step's thread polls for its answer before it sleeps, and asks a thread of the daemon
  // to poll for the next step: less delay for the time of two cores. Takes effect with shared
  // memory; the daemon polls for 2 ms at most, with few threads (limits.polling_threads).
  uint32_t spin_us = 0;
  std::string token;  // where the daemon requires one (auth.tokens)
  // For "tls:" addresses; PEM files. Who may have signed the daemon's certificate; "": the file
  // that the environment names as PREFIXD_TLS_CA, else who the system trusts.
  std::string tls_ca;
  // This client's own, for a daemon that asks who it is (tls.client_ca).
  std::string tls_certificate, tls_key;
  bool admin =
      false;  // serves every tenant; for the daemon's own user and for tokens with the right admin
};
// address: "unix:/path/to.sock", a plain path, "tcp:host:port", or "tls:host:port". The last needs
// libprefixd-tls.so, which is searched as libprefixd-embedded.so is, and a certificate that bears
// the host's name. kFailedPrecondition: the certificate is not accepted, or no TLS is spoken there.
Result<std::unique_ptr<Store>> Connect(std::string_view address,
                                       const ConnectOptions& options = {});

}  // namespace prefixd
