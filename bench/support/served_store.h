// A store behind the daemon's server, in this process: requests reach it through a socket, as those
// of any client do.
#pragma once

#include <filesystem>
#include <memory>

#include "prefixd/result.h"
#include "runtime/store/local_store.h"

namespace prefixd::bench {

// Serves the store on a socket in `dir`, whose path must be short. Returns a client; when that goes
// the server stops, which closes the store. One at a time: it stops by a SIGTERM to this process.
Result<std::shared_ptr<Store>> ServeStore(std::unique_ptr<LocalStore> store,
                                          const std::filesystem::path& dir);

}  // namespace prefixd::bench
