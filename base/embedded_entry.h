// Declares the one function that libprefixd-embedded.so exports. With it the client library opens a
// store in its own process (client_lib/open_embedded.cc). Both must come from one build: C++ values
// cross between them.
#pragma once

#include <memory>

#include "prefixd/options.h"
#include "prefixd/result.h"
#include "prefixd/store.h"
#include "prefixd/version.h"

namespace prefixd {

struct EmbeddedEntry {
  const char* version;  // PREFIXD_VERSION of the library; the client checks it first
  Result<std::unique_ptr<Store>> (*open)(const RuntimeOptions& options);
};

inline constexpr char kEmbeddedLibrary[] = "libprefixd-embedded.so." PREFIXD_SOVERSION;
inline constexpr char kEmbeddedSymbol[] = "prefixd_embedded_entry";

}  // namespace prefixd

extern "C" const prefixd::EmbeddedEntry* prefixd_embedded_entry();
