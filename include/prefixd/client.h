// The C++ interface's front door: a store of this process's own, or a running daemon's.
//
//   auto store = prefixd::Connect("unix:/run/prefixd/prefixd.sock");  // or prefixd::Open({.dir =
//   D}) auto session = (*store)->Attach({.model = "llama", .tokens = prompt}); for each layer:
//   (*session)->Step(layer, q, y, lse, nullptr);
//                   MergeStates(y_h, &lse_h, y_own_h, lse_own_h);
//
// Connect needs nothing but this library. Open loads libprefixd-embedded.so, which holds the store
// with everything that it is made of.
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
#include "prefixd/types.h"

namespace prefixd {

// A store of this process's own; locks the directory. kFailedPrecondition, with a sentence, where
// libprefixd-embedded.so is missing or was not built with this library: it is looked for beside the
// library or program that this is linked into, then where the system keeps libraries.
Result<std::unique_ptr<Store>> Open(const RuntimeOptions& options);

struct ConnectOptions {
  std::string tenant;  // default for calls that name none
  uint32_t connect_timeout_ms = 5000;
  uint32_t call_timeout_ms = 120000;  // 0: wait forever
  bool shared_memory = true;          // Unix sockets only: tensors go through shared memory
  std::string token;                  // TCP, where the daemon asks for one
  bool admin = false;  // every tenant; for the daemon's own user over its Unix socket only
};
// "unix:/path/to.sock", a plain path, or "tcp:host:port".
Result<std::unique_ptr<Store>> Connect(std::string_view address,
                                       const ConnectOptions& options = {});

}  // namespace prefixd
