// Loads what the client library does not link: the embedded store, TLS. Internal to client_lib.
#pragma once

#include <string>
#include <string_view>

#include "prefixd/result.h"
#include "prefixd/version.h"

namespace prefixd {

// Finds `symbol` in `library`, which is searched beside the library or program that contains this
// code, then where the system keeps libraries. It is never unloaded, because threads may run its
// code. The error's message says why not, alone.
Result<void*> LoadSymbol(const char* library, const char* symbol);

// Calls the library's one function, which returns its Entry. `cannot` makes the error of the
// reason.
template <typename Entry, typename Cannot>
Result<const Entry*> LoadEntry(const char* library, const char* symbol, const Cannot& cannot) {
  const auto found = LoadSymbol(library, symbol);
  if (!found.ok()) return cannot(found.error().message);
  const Entry* const entry = reinterpret_cast<const Entry* (*)()>(*found)();
  if (std::string_view(entry->version) != PREFIXD_VERSION) {
    return cannot("the one that was found is of version " + std::string(entry->version) +
                  ", this library of " + PREFIXD_VERSION);
  }
  return entry;
}

}  // namespace prefixd
