// What libprefixd-embedded.so exports: one function, by which the client library opens a store of
// its own process (client_lib/open_embedded.cc). Both are of one build: C++ values cross between
// them.
#pragma once

#include <memory>

#include "prefixd/options.h"
#include "prefixd/result.h"
#include "prefixd/store.h"
#include "prefixd/version.h"

namespace prefixd {

struct EmbeddedEntry {
  const char*
      version;  // PREFIXD_VERSION of the library; nothing else is looked at before it agrees
  Result<std::unique_ptr<Store>> (*open)(const RuntimeOptions& options);
};

inline constexpr char kEmbeddedLibrary[] = "libprefixd-embedded.so." PREFIXD_SOVERSION;
inline constexpr char kEmbeddedSymbol[] = "prefixd_embedded_entry";

}  // namespace prefixd

extern "C" const prefixd::EmbeddedEntry* prefixd_embedded_entry();
