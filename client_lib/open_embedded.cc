// Opens a store in the process itself. The store lies in a library that is loaded here, so that
// clients of a daemon load none of its dependencies.
#include <dlfcn.h>

#include <filesystem>
#include <string>

#include "base/embedded_entry.h"
#include "prefixd/client.h"

namespace prefixd {
namespace {

// Returns the folder of the library or program that contains this code; empty when it is unknown.
std::filesystem::path OwnFolder() {
  Dl_info info{};
  if (::dladdr(reinterpret_cast<const void*>(&OwnFolder), &info) == 0 || !info.dli_fname) return {};
  std::error_code ignored;
  const auto real = std::filesystem::canonical(info.dli_fname, ignored);
  return ignored ? std::filesystem::path() : real.parent_path();
}

Error CannotLoad(const std::string& why) {
  return {Code::kFailedPrecondition,
          "a store of this process's own needs " + std::string(kEmbeddedLibrary) + " (" + why +
              "); install it beside this library, or connect to a running daemon instead"};
}

// The library is loaded once and never unloaded, because threads of stores run its code.
Result<const EmbeddedEntry*> LoadEmbedded() {
  void* library = nullptr;
  if (const auto folder = OwnFolder(); !folder.empty()) {
    const auto beside = folder / kEmbeddedLibrary;
    std::error_code ignored;
    if (std::filesystem::exists(beside, ignored)) {
      library = ::dlopen(beside.c_str(), RTLD_NOW | RTLD_LOCAL);
      if (!library) return CannotLoad(::dlerror());
    }
  }
  if (!library) library = ::dlopen(kEmbeddedLibrary, RTLD_NOW | RTLD_LOCAL);
  if (!library) return CannotLoad(::dlerror());
  const auto entry =
      reinterpret_cast<decltype(&prefixd_embedded_entry)>(::dlsym(library, kEmbeddedSymbol));
  if (!entry) return CannotLoad(::dlerror());
  const EmbeddedEntry* found = entry();
  if (std::string_view(found->version) != PREFIXD_VERSION) {
    return CannotLoad("the one that was found is of version " + std::string(found->version) +
                      ", this library of " + PREFIXD_VERSION);
  }
  return found;
}

}  // namespace

Result<std::unique_ptr<Store>> Open(const RuntimeOptions& options) {
  static const Result<const EmbeddedEntry*> entry = LoadEmbedded();
  if (!entry.ok()) return entry.error();
  return (*entry)->open(options);
}

}  // namespace prefixd
