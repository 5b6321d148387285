// Opens a store in the process itself. The store lies in a library that is loaded here, so that
// clients of a daemon load none of its dependencies.
#include <string>

#include "base/embedded_entry.h"
#include "client_lib/load_library.h"
#include "prefixd/client.h"

namespace prefixd {

Result<std::unique_ptr<Store>> Open(const RuntimeOptions& options) {
  static const auto entry =
      LoadEntry<EmbeddedEntry>(kEmbeddedLibrary, kEmbeddedSymbol, [](const std::string& why) {
        return Error{Code::kFailedPrecondition,
                     "a store of this process's own needs " + std::string(kEmbeddedLibrary) + " (" +
                         why +
                         "); install it beside this library, or connect to a running daemon "
                         "instead"};
      });
  if (!entry.ok()) return entry.error();
  return (*entry)->open(options);
}

}  // namespace prefixd
